"""The graph megafuse works on: typed nodes in topological order, printable as runnable PyTorch.

A `Graph` is a straight-line program over logically contiguous tensors. Memory layout is no part of
it: a view (reshape, permute, expand, slice) is a node that only renames elements, and it is the
planner that turns views into addressing.

This module imports nothing of megafuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Union

import sympy
import torch

FUSABLE = (torch.float32, torch.float16, torch.bfloat16, torch.bool)
"""What generated code reads, computes and writes; tensors of other dtypes are left to PyTorch."""

Dim = Union[int, sympy.Expr]
"""An extent: an int, or an expression in the graph's run-time sizes (positive integers)."""

Scalar = Union[int, float, bool]
Arg = Union["Node", Scalar]


def symbol(name: str) -> sympy.Symbol:
    """A run-time size; positive, so that sympy can decide bounds."""
    return sympy.Symbol(name, integer=True, positive=True)


def as_dim(value: Any) -> Dim:
    """Normalise: ints stay ints, constant expressions become ints, others are expanded."""
    if isinstance(value, int):
        return value
    expr = sympy.expand(value)
    return int(expr) if expr.is_Integer else expr


def product(dims: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = as_dim(result * dim)
    return result


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The value of `dim` when each run-time size has the value given in `sizes`."""
    if isinstance(dim, int):
        return dim
    return int(dim.subs({s: sizes[s.name] for s in dim.free_symbols}))


@dataclass(frozen=True)
class TensorType:
    """Shape (extents, outermost first) and dtype of a logically contiguous tensor."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Dim:
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        return as_dim(self.numel * self.dtype.itemsize)

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
        return f"{short}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: the aten operator, the user's line and module, and the direction."""

    op: str = ""
    location: str | None = None
    module: str | None = None
    direction: Literal["forward", "backward"] = "forward"

    def __str__(self) -> str:
        where = " ".join(x for x in (self.location, f"({self.module})" if self.module else "") if x)
        return f"{self.op} {where}".strip()


@dataclass(eq=False)
class Node:
    """One operation. `args` are nodes and scalars in the operator's order; `attrs` the rest.

    ops whose args are nodes: see `megafuse.ops`. Special ones: "input" (a graph input; attrs
    "index"), "extern" (one aten call; attrs "target", "call_args", "call_kwargs" with nodes
    replaced by `Ref`), "item" (one output of a multi-output extern; attrs "index").
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    type: TensorType
    attrs: dict[str, Any] = field(default_factory=dict)
    origin: Origin = Origin()

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(a for a in self.args if isinstance(a, Node))

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def room(self) -> tuple[Dim, ...]:
        """The shape that it takes in memory: attrs "pitch", where there is one, is how many
        elements lie from one row to the next."""
        pitch = self.attrs.get("pitch")
        return self.shape if pitch is None else (*self.shape[:-1], pitch)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Ref:
    """Placeholder for `args[index]` inside an extern node's aten arguments."""

    index: int


@dataclass
class Graph:
    """Nodes in topological order. `outputs` may repeat nodes and hold None (no gradient)."""

    inputs: list[Node]
    nodes: list[Node]
    outputs: list[Node | None]
    made_by: str = "capture"

    def users(self) -> dict[Node, list[Node]]:
        """Each node's users, in order; graph outputs are not users."""
        result: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for operand in dict.fromkeys(node.inputs):
                result[operand].append(node)
        return result

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Run-time sizes: name → (input index, dimension) where it can be read."""
        result: dict[str, tuple[int, int]] = {}
        for node in self.inputs:
            for dim, extent in enumerate(node.shape):
                if isinstance(extent, sympy.Symbol):
                    result.setdefault(extent.name, (node.attrs["index"], dim))
        return result

    def live(self) -> set[Node]:
        """Nodes some output depends on."""
        seen: set[Node] = set()
        stack = [n for n in self.outputs if n is not None]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(node.inputs)
        return seen

    def __str__(self) -> str:
        from_where = f"# after {self.made_by}: {len(self.nodes)} nodes"
        return f"{from_where}\n{print_graph(self)}"


Spelling = Callable[[Node, list[str]], str]


def print_graph(graph: Graph, spell: Spelling | None = None) -> str:
    """The graph as Python source of a function `graph(*inputs)`.

    `spell(node, names of args)` gives the right-hand side; by default a neutral one is used that
    reads well but does not run. `megafuse.runtime.reference` passes the one that does.
    """
    runs = spell is not None
    spell = spell or (lambda node, names: f"{node.op}({', '.join(names + _attrs(node))})")
    lines = [f"def graph({', '.join(n.name for n in graph.inputs)}):"]
    position = {n.attrs["index"]: n.name for n in graph.inputs}
    for name, (index, dim) in graph.sizes.items():
        lines.append(f"    {name} = {position[index]}.shape[{dim}]")
    if runs:
        where = f"{graph.inputs[0].name}.device" if graph.inputs else "torch.device('cpu')"
        lines.append(f"    device = {where}")
    for node in graph.nodes:
        if node.op == "input":
            lines.append(f"    # {node.name}: {node.type}")
            continue
        names = [a.name if isinstance(a, Node) else repr(a) for a in node.args]
        lines.append(f"    {node.name} = {spell(node, names)}  # {node.type}  {node.origin}")
    results = ", ".join("None" if n is None else n.name for n in graph.outputs)
    lines.append(f"    return [{results}]")
    return "\n".join(lines) + "\n"


def _attrs(node: Node) -> list[str]:
    return [f"{k}={v}" for k, v in node.attrs.items()]


class Rewriter:
    """Builds a new graph from an old one, node by node; the way every pass is written.

    Subclasses override `visit(node, args)` and return the replacement; `emit` appends a node. A
    node whose replacement is another existing node simply vanishes.
    """

    name = "rewrite"

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.map: dict[Node, Node] = {}
        self._taken: set[str] = set()

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        return self.keep(node, args)

    def keep(self, node: Node, args: tuple[Arg, ...]) -> Node:
        """Append `node` with new arguments and everything else as it was."""
        return self._append(replace(node, args=args, attrs=dict(node.attrs)))

    def emit(
        self, op: str, args: tuple[Arg, ...], type: TensorType, origin: Origin, **attrs: Any
    ) -> Node:
        return self._append(Node(op, op, args, type, attrs, origin))

    def _append(self, node: Node) -> Node:
        node.name = self.fresh(node.name)
        self.nodes.append(node)
        return node

    def fresh(self, stem: str) -> str:
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def mapped(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(self.map[a] if isinstance(a, Node) else a for a in args)

    def run(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            if node.op == "input":
                self.map[node] = self.keep(node, ())
            else:
                self.map[node] = self.visit(node, self.mapped(node.args))
        return Graph(
            [self.map[n] for n in graph.inputs],
            self.nodes,
            [None if n is None else self.map[n] for n in graph.outputs],
            self.name,
        )


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node reachable through args from `roots`, each once, users first."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(node.inputs)
