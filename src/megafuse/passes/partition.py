"""Split the joint graph into forward and backward, choosing what forward saves.

A value that backward needs is either saved or recomputed from saved ones. The cheapest choice is a
minimum cut (the formulation of AOTAutograd's partitioner): an edge costs the bytes it takes to hold
a value, twice when forward would not write it anyway. Products, extern calls and reductions are
never recomputed; graph inputs are held by reference and cost nothing; views are never saved, their
base is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from megafuse.ir import Graph, Node, Rewriter, evaluate
from megafuse.ops import is_pointwise, is_view
from megafuse.passes.gathers import gathers


@dataclass(frozen=True)
class Split:
    """forward: outputs are the call's results, then the saved values.
    backward: inputs are the call's tensors (`x...`), the saved values, the upstream gradients.
    saved: names of the saved nodes in the joint graph.
    """

    forward: Graph
    backward: Graph | None
    saved: tuple[Node, ...]


def base_of(node: Node) -> Node:
    """The node a chain of views looks at."""
    while is_view(node):
        node = node.inputs[0]
    return node


def partition(
    joint: Graph,
    outputs: int,
    primals: int,
    sizes: Mapping[str, int],
    memory: Literal["balanced", "min"] = "balanced",
) -> Split:
    """outputs: how many of the joint graph's outputs are forward's; primals: how many of its inputs
    are the call's tensors; sizes: values of the run-time sizes to weigh bytes with."""
    grads = joint.outputs[outputs:]
    tainted: set[Node] = set()
    for node in joint.nodes:
        is_tangent = node.op == "input" and node.attrs["index"] >= primals
        asks = node.origin.direction == "backward" and _own_extreme(node) is not None
        if is_tangent or asks or any(i in tainted for i in node.inputs):
            tainted.add(node)
    wanted = _needed_by_backward(joint, grads, tainted)
    saved = _choose(joint, joint.outputs[:outputs], wanted, tainted, sizes, memory)
    forward = _extract(joint, joint.inputs[:primals], [*joint.outputs[:outputs], *saved], {})
    forward.made_by = "partition (forward)"
    if all(g is None for g in grads):
        return Split(forward, None, ())
    backward = _extract(joint, joint.inputs, grads, {n: i for i, n in enumerate(saved)}, primals)
    backward.made_by = "partition (backward)"
    return Split(forward, backward, tuple(saved))


def _needed_by_backward(
    joint: Graph, grads: list[Node | None], tainted: set[Node]
) -> set[Node]:
    live = Graph(joint.inputs, joint.nodes, list(grads)).live()
    wanted = {g for g in grads if g is not None and g not in tainted}
    for node in live & tainted:
        wanted |= {i for i in node.inputs if i not in tainted}
    return wanted


def _choose(
    joint: Graph,
    results: list[Node | None],
    wanted: set[Node],
    tainted: set[Node],
    sizes: Mapping[str, int],
    memory: str,
) -> list[Node]:
    in_forward = Graph(joint.inputs, joint.nodes, results).live()
    written = {base_of(n) for n in results if n is not None}
    for node in in_forward:
        if node.op in ("matmul", "extern"):
            written.add(node)
            written |= {base_of(i) for i in node.inputs}
    kept = set()
    if memory == "balanced":  # recomputing an operand would cost another store
        for node in joint.nodes:
            if node.op in ("matmul", "extern") and node in tainted:
                kept |= {base_of(i) for i in node.inputs if i not in tainted} & written
        # Gathered again, with the statistics of every piece, it cost backward twice what writing it
        # costs forward (docs/perf-log.md, section 22).
        kept |= {n for n in in_forward - tainted if gathers(n, written)}
    kept |= {value for n in tainted if (value := _own_extreme(n)) is not None}
    flow = nx.DiGraph()
    unlimited = float("inf")
    for node in joint.nodes:
        if node in tainted or node.op in ("input", "full"):
            continue
        cost = float(evaluate(node.type.nbytes, sizes)) + 1.0
        if is_view(node):
            cost = unlimited
        elif node not in written:
            cost *= 2
        flow.add_edge((node, "in"), (node, "out"), capacity=cost)
        for i in node.inputs:
            if i.op not in ("input", "full"):
                flow.add_edge((i, "out"), (node, "in"), capacity=unlimited)
        if node in wanted:
            flow.add_edge((node, "out"), "backward", capacity=unlimited)
        if not (is_pointwise(node) or is_view(node) or node.op == "cat") or node in kept:
            flow.add_edge("forward", (node, "in"), capacity=unlimited)
    if "backward" not in flow or "forward" not in flow:
        return []
    # Of equal cuts networkx returns the one nearest the sink: rstd rather than the raw sum.
    _, (before, _) = nx.minimum_cut(flow, "forward", "backward")
    return [n for n in joint.nodes if (n, "in") in before and (n, "out") not in before]


def _own_extreme(node: Node) -> Node | None:
    """The value that `node` compares with its own maximum or minimum, as their gradient does.

    Backward reads both from memory: computed a second time, even in another phase of the same
    program, the value might differ in the last bit and equal its maximum nowhere.
    """
    if node.op not in ("eq", "ne") or len(node.inputs) != 2:
        return None
    for value, extreme in (node.inputs, node.inputs[::-1]):
        extreme = base_of(extreme)
        name = extreme.attrs.get("target", extreme.op).removeprefix("aten.").split(".")[0]
        if name in ("amax", "amin") and base_of(value) in map(base_of, extreme.inputs):
            return base_of(value)
    return None


class _Extract(Rewriter):
    name = "partition"


def _extract(
    joint: Graph,
    inputs: list[Node],
    outputs: list[Node | None],
    saved: dict[Node, int],
    primals: int = 0,
) -> Graph:
    """The part of `joint` that computes `outputs` from `inputs` and the saved nodes."""
    builder = _Extract()
    needed: set[Node] = set()
    stack = [n for n in outputs if n is not None]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in saved:
                stack.extend(node.inputs)
    new_inputs: list[Node] = []

    def add_input(node: Node, role: str) -> None:
        new = builder.emit("input", (), node.type, node.origin, index=len(new_inputs), role=role)
        if role == "saved" and "pitch" in node.attrs:
            new.attrs["pitch"] = node.attrs["pitch"]
        new.name = node.name
        builder.map[node] = new
        new_inputs.append(new)

    for node in inputs[:primals] if saved or primals else inputs:
        add_input(node, "primal")
    for node in saved:
        add_input(node, "saved")
    for node in inputs[primals:] if primals else []:
        add_input(node, "grad")
    for node in joint.nodes:
        if node in needed and node not in builder.map:
            builder.map[node] = builder.keep(node, builder.mapped(node.args))
    results = [None if n is None else builder.map[n] for n in outputs]
    return Graph(new_inputs, builder.nodes, results)
