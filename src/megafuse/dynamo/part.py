"""One fused part: a group of operators compiled by megafuse's planner and code generator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from megafuse import dump, passes
from megafuse.config import Options
from megafuse.dynamo.reader import LeftToPyTorch, Reader
from megafuse.dynamo.schedule import Group, readers_of
from megafuse.fusion.describe import computed
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.fusion.planner import Planner
from megafuse.ir import Dim, Graph, Node, Origin, Rewriter, TensorType, as_dim, evaluate
from megafuse.passes.partition import base_of
from megafuse.runtime.call import _plain
from megafuse.runtime.executor import Executor, has_epilogues
from megafuse.runtime.reference import interpret


@dataclass(frozen=True)
class Layout:
    """How an output leaves a part: with the strides its PyTorch operator gives it, and in memory
    that no other tensor uses (copy: the plan's own result does not promise that)."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    copy: bool


_Placing = tuple[tuple[int, ...], list[torch.Tensor], list[Any]]


class Part(nn.Module):
    """Callable: a list of run-time sizes (in order of name), then tensors of any layout on one
    device. The list is emptied, so that each tensor can be freed after its last use; the tensors
    are not written. Returns a tuple of new tensors.

    nodes: the operators of the part. inputs, outputs: the FX nodes it takes and returns. sizes: the
    names of the run-time sizes it is given; derived: those it computes from them.
    """

    def __init__(self, reader: Reader, group: Group, options: Options) -> None:
        """Raises LeftToPyTorch where nothing would be gained, ToolchainError and BuildError."""
        super().__init__()
        self.nodes, self.device = group.nodes, group.device
        self.direction: Literal["forward", "backward"] = reader.direction
        self.outputs = _outputs(reader, group)
        graph, self.inputs = _extract(reader, group, self.outputs)
        self.hints = {name: reader.hints[name] for name in graph.sizes}
        observe = dump.observer(options)
        stages: list[Graph] = []
        epilogues = has_epilogues(self.device, options)
        graph = passes.run(graph, stages.append, epilogues, sizes=self.hints)
        for i, stage in enumerate(stages):
            observe(f"{i:02d}-{stage.made_by.split()[0]}.py", str(stage))
        planner = Planner(graph, self.direction, self.hints, options.fuel, epilogues)
        self.plan: GraphPlan = planner.plan()
        observe(f"plan-{self.direction}.txt", dump.plan_text(self.plan))
        rows = [r for r in self.plan.regions if isinstance(r, RowRegion)]
        if all(len(computed(r)) < 2 for r in rows):
            raise LeftToPyTorch("no neighbour to fuse with")
        self.layouts = _layouts(reader, self.outputs, graph)
        used = set(graph.sizes).union(*(_named(d) for x in self.layouts for d in x.strides))
        self.derived = {n: reader.derived[n] for n in used if n in reader.derived}
        given = used.difference(self.derived).union(*map(_named, self.derived.values()))
        self.sizes = sorted(given)
        self._at: dict[tuple[int, ...], _Placing] = {}
        self._run: Callable[[list[Any], tuple[int, ...]], list[Any]]
        if options.executor == "reference":
            function = interpret(graph)
            self._run = lambda tensors, sizes: function(*tensors)
        else:
            self._run = Executor(self.plan, self.device, options, None).run

    def forward(self, args: list[Any]) -> tuple[torch.Tensor, ...]:
        sizes = tuple(args[: len(self.sizes)])
        at = self._at.get(sizes)
        if at is None:
            at = self._at[sizes] = self._placing(sizes)
        all_sizes, extents, layouts = at
        with torch.no_grad(), _current(self.device):
            tensors = [_plain(t) for t in args[len(self.sizes) :]] + extents
            args.clear()
            results = self._run(tensors, all_sizes)
            return tuple(_placed(r, *layout) for r, layout in zip(results, layouts, strict=True))

    def _placing(self, sizes: tuple[int, ...]) -> _Placing:
        """What depends on the sizes alone: those of the graph in order of name, stand-ins for its
        inputs that only show a size, and how each output is laid out (`_placed`)."""
        named = dict(zip(self.sizes, sizes, strict=True))
        named |= {name: evaluate(expr, named) for name, expr in self.derived.items()}
        nothing = torch.empty(1, dtype=torch.bool)
        shown = list(self.plan.graph.inputs[len(self.inputs) :])
        extents = [nothing.expand(evaluate(node.shape[0], named)) for node in shown]
        layouts: list[Any] = []
        for layout in self.layouts:
            shape = [evaluate(d, named) for d in layout.shape]
            strides = [evaluate(d, named) for d in layout.strides]
            layouts.append((_relevant(shape, strides), strides, layout.copy))
        return tuple(named[n] for n in sorted(self.plan.graph.sizes)), extents, layouts


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched in the context of their own device, whichever the caller's is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _relevant(shape: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """(dimension, stride) wherever the stride means something."""
    return [(i, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1]


def _placed(
    tensor: torch.Tensor, relevant: list[tuple[int, int]], strides: list[int], copy: bool
) -> torch.Tensor:
    if not copy and all(tensor.stride(i) == s for i, s in relevant):
        return tensor
    new = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)


def _outputs(reader: Reader, group: Group) -> list[fx.Node]:
    """The operators of `group` that someone outside needs the value of."""
    own = set(group.nodes)
    return [n for n in group.nodes if any(u not in own for u in readers_of(reader, n))]


def _taken(reader: Reader, group: Group) -> dict[Node, fx.Node]:
    """The tensors that come from outside, by IR value. Views of them are part of the group, where
    they are addressing; but what is row-major only as a view (attention's result, whose heads lie
    beside each other) is taken as that view, for the group would copy anything else."""
    own, taken = set(group.nodes), dict[Node, fx.Node]()
    for operand in (n for node in group.nodes for n in node.all_input_nodes):
        if reader.kinds[operand] == "size":
            continue
        chain = [operand]
        while reader.kinds[chain[-1]] == "view":
            chain.append(chain[-1].all_input_nodes[0])
        if chain[-1] not in own:
            chain.reverse()
            node = next((n for n in chain if _row_major(reader, n)), chain[0])
            taken.setdefault(reader.values[node], node)
    return taken


def _row_major(reader: Reader, node: fx.Node) -> bool:
    value = reader.value(node)
    if not isinstance(value, torch.Tensor) or not isinstance(reader.values[node], Node):
        return False
    step: Dim = 1
    for extent, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if reader.dim(extent) != 1 and reader.dim(stride) != step:
            return False
        step = as_dim(step * reader.dim(extent))
    return True


def _extract(reader: Reader, group: Group, outputs: list[fx.Node]) -> tuple[Graph, list[fx.Node]]:
    """The IR graph of `group` and the FX nodes whose tensors it takes. Run-time sizes that none of
    those shows are inputs of that extent."""
    outside = _taken(reader, group)
    builder = Rewriter()
    new_inputs: list[Node] = []

    def add_input(name: str, type: TensorType, origin: Origin) -> Node:
        node = builder.emit("input", (), type, origin, index=len(new_inputs), role="primal")
        node.name = name
        new_inputs.append(node)
        return node

    wanted: set[Node] = set()
    stack: list[Node] = [reader.values[n] for n in outputs]
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(() if node in outside else node.inputs)
    used = [n for n in reader.nodes if n in wanted and n in outside]
    for i, node in enumerate(used):
        builder.map[node] = add_input(f"x{i}", node.type, node.origin)
    kept = [n for n in reader.nodes if n in wanted and n not in outside]
    shown = Graph(new_inputs, [], []).sizes
    for name in sorted({s.name for n in (*used, *kept) for s in _symbols(n)} - set(shown)):
        extent = next(s for n in (*used, *kept) for s in _symbols(n) if s.name == name)
        add_input(f"size_{name}", TensorType((extent,), torch.bool), Origin("size"))
    for node in kept:
        builder.map[node] = builder.keep(node, builder.mapped(node.args))
    results: list[Node | None] = [builder.map[reader.values[n]] for n in outputs]
    graph = Graph(new_inputs, builder.nodes, results, f"capture ({reader.direction})")
    return graph, [outside[n] for n in used]


def _named(expr: Dim) -> set[str]:
    """The run-time sizes that `expr` depends on."""
    return set() if isinstance(expr, int) else {s.name for s in expr.free_symbols}


def _symbols(node: Node) -> list[Any]:
    """The run-time sizes in a node's shape and arguments."""
    values = [*node.shape, *node.args, *node.attrs.values()]
    found = [v.free_symbols for v in values if hasattr(v, "free_symbols")]
    return [s for symbols in found for s in symbols]


def _layouts(reader: Reader, outputs: list[fx.Node], graph: Graph) -> list[Layout]:
    """graph: after the passes, which may have made two outputs one."""
    layouts, taken = [], {n for n in graph.nodes if n.op == "input"}
    for node, result in zip(outputs, graph.outputs, strict=True):
        assert result is not None
        buffer = base_of(result)
        copy = buffer in taken or buffer.type.numel != result.type.numel
        taken.add(buffer)
        value = reader.value(node)
        shape, strides = ([reader.dim(s) for s in ss] for ss in (value.shape, value.stride()))
        layouts.append(Layout(tuple(shape), tuple(strides), copy))
    return layouts
