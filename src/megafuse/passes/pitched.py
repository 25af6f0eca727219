"""Rows that products read and write start at multiples of 16 bytes, as the copy engine asks.

Before → after, for large 16-bit products on Hopper with extents that are no multiples of 8:
    matmul(f(x), b)       → the same; f(x) lies in memory with a "pitch", its rows that far apart
    matmul(input, b)      → matmul(copy(input), b)       the copy has the pitch
    output of a matmul    → copy(matmul)                 the product has the pitch

A pitch costs nothing: extents, and so the arithmetic, stay what they are. A copy has to be worth
its time, which products that share it pay together; a product with an operand that cannot be helped
stays as it is. What the caller sees, and what PyTorch's own operators read, has no pitch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch

from megafuse.device import H200
from megafuse.ir import Arg, Dim, Graph, Node, Rewriter, TensorType, evaluate, product
from megafuse.ops import is_view
from megafuse.passes.additions import HALVES
from megafuse.passes.epilogue import PIECE
from megafuse.passes.operands import TRANSPOSED, Layout, layout_of
from megafuse.passes.partition import base_of

LEAST_EXTENT, LEAST_RESULT = 16, 64 * 64
"""Of a product's m, n and k, and of m * n. In smaller ones most of a tile is empty, and PyTorch has
kernels made for them."""

SLOWER = 3.0
"""How much longer PyTorch's product takes than it has to where rows are not aligned. On an H200 3.5
to 7 times was seen of what the arithmetic takes (1196 and 551 columns), 4 times of what reading and
writing take (780 columns, batch 57): results/h200/sweep-partial.txt."""

# What is left of the copy bandwidth where the widest aligned access has so many elements.
_NARROW = {1: 0.4, 2: 0.7}


@dataclass
class _Needs:
    """What one product lacks. pitch: values of ours to be given one; operands: what has to be
    copied before, and what tells a copy from another; result: whether the product has to be copied
    afterwards."""

    pitch: set[Node] = field(default_factory=set)
    operands: dict[Node, Layout] = field(default_factory=dict)
    result: bool = False


class _Search:
    """Decides on a graph of its own, whose nodes it marks."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.users = graph.users()
        self.shown = {base_of(o) for o in graph.outputs if o is not None}
        self.shown |= {base_of(i) for n in graph.nodes if n.op == "extern" for i in n.inputs}
        self.copies: dict[Node, Layout] = {}
        self.results: set[Node] = set()
        marked = {n for p in graph.nodes if p.op == "matmul" for n in map(base_of, (p, *p.inputs))
                  if self._mark(n)}  # fmt: skip
        found = {n: needs for n in graph.nodes if (needs := self._needs(n)) is not None}
        used: set[Node] = set()
        for node, needs in self._worthwhile(found):
            used |= needs.pitch
            self.copies |= needs.operands
            if needs.result:
                self.results.add(node)
        for node in marked - used:
            del node.attrs["pitch"]

    def _mark(self, node: Node) -> bool:
        """Gives `node` a pitch, if products can still read it by strides then."""
        if node.op in ("input", "extern", "item", "full") or node.dtype not in HALVES:
            return False
        if len(node.shape) < 2 or _aligned(node.shape[-1]) or not isinstance(node.shape[-1], int):
            return False
        if node in self.shown and node.op != "matmul":
            return False
        node.attrs["pitch"] = _whole(node.shape[-1])
        layouts = [layout_of(x) for x in self._operands_over(node)]
        if all(layout is not None and layout.strided for layout in layouts):
            return True
        del node.attrs["pitch"]
        return False

    def _operands_over(self, node: Node) -> list[Node]:
        """The operands of products that look at `node`, through views or at once."""
        found, stack = [], [node]
        while stack:
            x = stack.pop()
            if any(u.op == "matmul" for u in self.users[x]):
                found.append(x)
            stack += [u for u in self.users[x] if is_view(u)]
        return found

    def _needs(self, node: Node) -> _Needs | None:
        """None where nothing has to be done, and where nothing can be."""
        if node.op != "matmul" or node.dtype not in HALVES:
            return None
        _, m, n, k = self._extents(node)
        if min(m, n, k) < LEAST_EXTENT or m * n < LEAST_RESULT:
            return None
        needs = _Needs()
        a, b, *extras = node.inputs
        if not _aligned(node.shape[2]):
            if "tensor" in node.attrs.get("epilogue", ()):
                return None
            for x in extras:  # rows, which the kernel reads to their last piece's end
                if (layout := layout_of(x)) is None or not layout.strided:
                    return None
                needs.operands[x] = layout
        for x in (a, b):
            layout = layout_of(x)
            if layout is None or not layout.strided or x.dtype not in HALVES:
                return None
            if not (layout.dense(1) or layout.dense(2)):
                return None  # turned by its copy, which costs more than is known here
            if not _addressable(layout):
                needs.operands[x] = _turned(layout)
            elif "pitch" in layout.base.attrs and layout.base not in self.shown:
                needs.pitch.add(layout.base)
        if not _aligned(node.shape[2]):
            if "pitch" not in node.attrs:
                return None
            needs.pitch.add(node)
            needs.result = node in self.shown
            if needs.result and self._operands_over(node):
                return None
        return needs

    def _worthwhile(self, found: Mapping[Node, _Needs]) -> list[tuple[Node, _Needs]]:
        """The products whose gain is more than their share of the copies they need."""
        sharers: dict[Layout, int] = {}
        for needs in found.values():
            for layout in needs.operands.values():
                sharers[layout] = sharers.get(layout, 0) + 1

        def worth(node: Node, needs: _Needs) -> bool:
            batch, m, n, k = self._extents(node)
            arithmetic = 2 * batch * m * n * k / H200.matmul_rate[torch.bfloat16]
            memory = 2 * batch * (m * n + m * k + k * n) / H200.bandwidth
            gain = (SLOWER - 1) * max(arithmetic, memory)
            price = sum(self._seconds(x.shape) / sharers[o] for x, o in needs.operands.items())
            price += self._seconds(node.shape) if needs.result else 0.0
            return gain > price or not price

        return [(node, needs) for node, needs in found.items() if worth(node, needs)]

    def _extents(self, node: Node) -> tuple[int, int, int, int]:
        """batch, m, n and k."""
        batch, m, n = (evaluate(d, self.sizes) for d in node.shape)
        return batch, m, n, evaluate(node.inputs[0].shape[2], self.sizes)

    def _seconds(self, shape: tuple[Dim, ...]) -> float:
        """Predicted time of a copy of 16-bit elements."""
        width = _NARROW.get(math.gcd(evaluate(shape[-1], self.sizes), PIECE), 1.0)
        nbytes = 2 * 2 * evaluate(product(shape), self.sizes)
        return nbytes / (width * H200.bandwidth) + H200.launch_seconds


class _Copies(Rewriter):
    name = "pitched"

    def __init__(self, search: _Search) -> None:
        super().__init__()
        self.search = search
        self.made: dict[Layout, Node] = {}

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node.op == "matmul":
            args = tuple(
                self._operand(old, new) if isinstance(old, Node) and isinstance(new, Node) else new
                for old, new in zip(node.args, args, strict=True)
            )
        new = self.keep(node, args)
        if node in self.search.results:
            return self.emit("cast", (new,), node.type, node.origin)
        return new

    def _operand(self, old: Node, new: Node) -> Node:
        key, layout = self.search.copies.get(old), layout_of(old)
        if key is None or layout is None:
            return new
        turn = _turned(layout) is not layout
        if key not in self.made:
            x = self._transposed(new) if turn else new
            pitch = _whole(x.shape[2])
            self.made[key] = self.emit("cast", (x,), x.type, x.origin, pitch=pitch)
        copy = self.made[key]
        return self._transposed(copy) if turn else copy

    def _transposed(self, x: Node) -> Node:
        type = TensorType(tuple(x.shape[i] for i in TRANSPOSED), x.dtype)
        return self.emit("permute", (x,), type, x.origin, order=TRANSPOSED)


def _turned(layout: Layout) -> Layout:
    """`layout` with the dimension that lies together in memory last, if one does."""
    if layout.dense(1) and not layout.dense(2):
        return Layout(layout.base, tuple(layout.dims[i] for i in TRANSPOSED), layout.start)
    return layout


def _addressable(layout: Layout) -> bool:
    """Whether the copy engine finds every row at a multiple of 16 bytes."""
    steps = [loops[-1][1] if loops else 0 for loops in layout.dims]
    return _aligned(layout.start) and any(
        (not layout.dims[inner] or steps[inner] == 1)
        and all(_aligned(step) for i, step in enumerate(steps) if i != inner)
        for inner in (1, 2)
    )


def _aligned(extent: Dim) -> bool:
    """Whether it is a multiple of PIECE for all run-time sizes."""
    if isinstance(extent, int):
        return extent % PIECE == 0
    return all(int(c) % PIECE == 0 for c in sympy.Poly(extent, *extent.free_symbols).coeffs())


def _whole(extent: Dim) -> Dim:
    assert isinstance(extent, int)
    return -(-extent // PIECE) * PIECE


def pitched(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """sizes: the run-time sizes of the call that the plan is made for; they weigh copies."""
    own = Rewriter().run(graph)
    return _Copies(_Search(own, sizes)).run(own)
