"""Copies that products need, made once and in the open.

Before → after, where a product's operand is no strided view of the tensor under it (heads split off
packed q, k, v, say):
    matmul(view(x), b)      → matmul(c, b)                    c = copy(view(x))
    matmul(a, view'(x))     → matmul(a, permute(c))           the same elements, transposed

Two operands that hold the same elements share one copy, and a copy is a value like any other: what
forward writes, backward may keep.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megafuse.index import (
    NeedSplit,
    NotAffine,
    fresh_coords,
    offset,
    operand_coords,
    split_axis,
    substitute,
)
from megafuse.ir import Arg, Dim, Graph, Node, Rewriter, TensorType, as_dim
from megafuse.ops import is_view

Loops = tuple[tuple[Dim, Dim], ...]
TRANSPOSED = (0, 2, 1)


@dataclass(frozen=True)
class Layout:
    """A chain of views over `base`: for each dimension its loops, outermost first, as (extent,
    stride in elements of `base`)."""

    base: Node
    dims: tuple[Loops, ...]
    start: Dim

    @property
    def strided(self) -> bool:
        """Whether each dimension has one stride."""
        return all(
            as_dim(outer[1] - inner[0] * inner[1]) == 0
            for loops in self.dims for outer, inner in itertools.pairwise(loops)
        )  # fmt: skip

    def dense(self, dim: int) -> bool:
        """Whether neighbours along `dim` are neighbours in memory."""
        loops = self.dims[dim]
        return bool(loops) and loops[-1][1] == 1


def layout_of(node: Node) -> Layout | None:
    """None where no loops make the views affine."""
    _, coords = fresh_coords(node)
    while True:
        at, base = coords, node
        try:
            while is_view(base):
                at, base = operand_coords(base, base.inputs[0], at), base.inputs[0]
            break
        except NeedSplit as need:
            _, _, replacement = split_axis(need.axis, need.inner)
            coords = substitute(coords, {need.axis: replacement})
        except NotAffine:
            return None
    form = offset(at, base.room)
    dims = tuple(
        tuple((axis.extent, form.coefficient(axis)) for axis, _ in c.sorted_terms()) for c in coords
    )
    return Layout(base, dims, form.const)


class CopiedOperands(Rewriter):
    name = "operands"

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Layout, Node] = {}

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node.op != "matmul":
            return self.keep(node, args)
        a, b, *rest = args
        assert isinstance(a, Node) and isinstance(b, Node)
        return self.keep(node, (self._operand(a), self._operand(b), *rest))

    def _operand(self, x: Node) -> Node:
        layout = layout_of(x) if is_view(x) else None
        if layout is None or layout.strided:
            return x
        if layout.dense(1) and not layout.dense(2):
            turned = Layout(layout.base, tuple(layout.dims[i] for i in TRANSPOSED), layout.start)
            return self._transposed(self._copy(self._transposed(x), turned))
        return self._copy(x, layout)

    def _transposed(self, x: Node) -> Node:
        shape = tuple(x.shape[i] for i in TRANSPOSED)
        return self.emit("permute", (x,), TensorType(shape, x.dtype), x.origin, order=TRANSPOSED)

    def _copy(self, x: Node, layout: Layout) -> Node:
        if layout not in self.copies:
            self.copies[layout] = self.emit("cast", (x,), x.type, x.origin)
        return self.copies[layout]


def copied_operands(graph: Graph) -> Graph:
    return CopiedOperands().run(graph)
