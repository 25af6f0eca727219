"""From a call to a plan: capture, passes, partition, fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafuse import dump, passes
from megafuse.capture import Captured, batch_size, capture
from megafuse.config import Options
from megafuse.errors import CaptureError, InvariantError
from megafuse.fusion.plan import GraphPlan
from megafuse.fusion.planner import Planner
from megafuse.invariants import check_graph
from megafuse.ir import Graph, Node
from megafuse.layouts import Layouts
from megafuse.passes.in_memory import RESHAPE
from megafuse.passes.partition import Split, base_of, partition

Observe = Callable[[str, str], None]


@dataclass
class Plan:
    """Both directions of one captured call. joint: the graph after the passes; hints: the run-time
    sizes of the call it was made for; sources: for each flat tensor, which upstream gradients its
    own gradient comes from; reads: the flat tensors that backward reads; copied: the forward
    outputs that are an input as it is, which eager copies."""

    captured: Captured
    joint: Graph
    split: Split
    forward: GraphPlan
    backward: GraphPlan | None
    hints: dict[str, int]
    sources: list[frozenset[int]]
    reads: tuple[int, ...]
    copied: frozenset[int]

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The run-time sizes of a call, read off its flat tensors."""
        return {
            name: int(tensors[index].shape[dim])
            for name, (index, dim) in self.captured.graph.sizes.items() if index < len(tensors)
        }  # fmt: skip


def make_plan(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[bool],
    needs_grad: Sequence[bool],
    module: nn.Module | None,
    options: Options,
    observe: Observe = lambda name, text: None,
    epilogues: bool = False,
    layouts: Layouts | None = None,
    dynamic: bool = True,
    on_gpu: bool = False,
) -> Plan:
    """Plan `function(tensors)` with its gradients; see `capture` for the arguments.

    observe: gets (name, text) of every stage, for MEGAFUSE_DUMP. epilogues: whether products can
    add bias and residual before they store. layouts: eager's, from `layouts.probe`.
    dynamic: whether the batch is a run-time size. on_gpu: whether convolutions are cuDNN's.
    Raises CaptureError, UnsupportedError, and what the user's own code raises.
    """
    try:
        try:
            captured = capture(function, tensors, parameters, needs_grad, module, dynamic, layouts)
            check_graph(captured.graph)
        except (CaptureError, InvariantError):
            if not dynamic or batch_size(tensors, parameters) is None:
                raise
            # The code may need to know its batch size; then the plan is for that size only.
            captured = capture(function, tensors, parameters, needs_grad, module, False, layouts)
    except CaptureError as error:
        if error.own is not None:
            raise error.own from None
        raise
    count = 0

    def see(graph: Graph) -> None:
        nonlocal count
        observe(f"{count:02d}-{graph.made_by.split()[0]}.py", str(graph))
        count += 1

    hints = {
        name: max(2, int(tensors[index].shape[dim]))
        for name, (index, dim) in captured.graph.sizes.items() if index < len(tensors)
    }  # fmt: skip
    joint = passes.run(captured.graph, see, epilogues, on_gpu, hints)
    split = partition(joint, captured.outputs, len(tensors), hints, options.memory)
    see(split.forward)
    forward = Planner(split.forward, "forward", hints, options.fuel, epilogues).plan()
    backward = None
    if split.backward is not None:
        see(split.backward)
        fuel = None if options.fuel is None else options.fuel - len(forward.merges)
        backward = Planner(split.backward, "backward", hints, fuel, epilogues).plan()
        observe("plan-backward.txt", dump.plan_text(backward))
    observe("plan-forward.txt", dump.plan_text(forward))
    observe("repro.py", dump.repro(joint, captured.outputs, len(tensors), list(needs_grad), hints,
                                   options))  # fmt: skip
    sources = _sources(joint, captured.outputs, len(tensors))
    reads = _reads(split.backward, len(tensors))
    copied = _copied(split.forward, captured.outputs)
    return Plan(captured, joint, split, forward, backward, hints, sources, reads, copied)


def _reads(backward: Graph | None, primals: int) -> tuple[int, ...]:
    if backward is None:
        return ()
    live = backward.live()
    return tuple(i for i, node in enumerate(backward.inputs[:primals]) if node in live)


def _copied(forward: Graph, outputs: int) -> frozenset[int]:
    def is_input(node: Node) -> bool:
        node = base_of(node)
        if node.attrs.get("target") == RESHAPE:
            return is_input(node.inputs[0])
        return node.op == "input"

    wanted = enumerate(forward.outputs[:outputs])
    return frozenset(i for i, o in wanted if o is not None and is_input(o))


def _sources(joint: Graph, outputs: int, primals: int) -> list[frozenset[int]]:
    reached: dict[Node, frozenset[int]] = {}
    for node in joint.nodes:
        if node.op == "input":
            index = node.attrs["index"] - primals
            reached[node] = frozenset({index}) if index >= 0 else frozenset()
        else:
            reached[node] = frozenset().union(*(reached[i] for i in node.inputs))
    return [frozenset() if g is None else reached[g] for g in joint.outputs[outputs:]]
