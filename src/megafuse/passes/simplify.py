"""Small rewrites that leave the graph with one way to say each thing.

Before → after:
    reshape(reshape(x))            → reshape(x)
    permute(permute(x))            → permute(x)
    sum(cat(a, b, d), dims)        → cat(sum(a), sum(b), d)        d not in dims
    cat(a, 0, d) + cat(0, b, d)    → cat(a, b, d)                  gradients of slices
    reshape(cat) + reshape(cat')   → reshape(cat + cat')           and of every other element
    any view of a constant         → the constant in that shape
    sum(x, dims of both kinds)     → sum(sum(x, inner), outer)     inner = the trailing dims
    sum(reshape(permute(x)))       → reshape(sum(x))               x ends in summed dims
    cast(reshape(sum(x) f32), t)   → reshape(sum(x) t)             the sum used once
    x * 1, x / 1                   → x                             exact, NaN and -0 included
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafuse.ir import Arg, Dim, Graph, Node, Rewriter, TensorType, as_dim
from megafuse.ops import is_view


def _is_one(arg: Arg) -> bool:
    return type(arg) in (int, float) and arg == 1


def _given(node: Node) -> bool:
    """Whether `node` is a graph input's own elements: a result is never the caller's tensor."""
    while is_view(node):
        node = node.inputs[0]
    return node.op == "input"


class Simplify(Rewriter):
    """One sweep of the rewrites above; `simplify` repeats it until nothing changes."""

    name = "simplify"

    def __init__(self, uses: dict[Node, int]) -> None:
        super().__init__()
        self.uses = uses
        self.changed = False
        self._old: dict[Node, Node] = {}

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        new = self._rewrite(node, args)
        if new is None:
            new = self.keep(node, args)
        else:
            self.changed = True
        self._old[new] = node
        return new

    def _single(self, new: Node) -> bool:
        return self.uses.get(self._old.get(new, new), 2) == 1

    def _rewrite(self, node: Node, args: tuple[Arg, ...]) -> Node | None:
        x = args[0] if args and isinstance(args[0], Node) else None
        if x is None:
            return None
        if is_view(node) and x.op == "full":
            return self.emit("full", (), node.type, node.origin, **x.attrs)
        match node.op:
            case "add":
                return self._disjoint(node, x, args[1])
            case "reshape" if x.shape == node.shape:
                return x
            case "reshape" if x.op == "reshape":
                return self.emit("reshape", x.args, node.type, node.origin)
            case "permute" if node.attrs["order"] == tuple(range(len(x.shape))):
                return x
            case "permute" if x.op == "permute":
                order = tuple(x.attrs["order"][i] for i in node.attrs["order"])
                return self.emit("permute", x.args, node.type, node.origin, order=order)
            case "expand" if x.shape == node.shape:
                return x
            case "cast" if x.dtype == node.dtype:
                return x
            case "mul" | "div" if _is_one(args[1]) and x.type == node.type and not _given(x):
                return x
            case "cast" if x.dtype == torch.float32 and not node.attrs.get("written"):
                return self._cast_of_sum(node, x)
            case "sum":
                return self._sum(node, x)
        return None

    def _disjoint(self, node: Node, a: Node, b: object) -> Node | None:
        """Gradients of slices: zero-padded pieces of one tensor that do not overlap."""
        if not isinstance(b, Node) or a.shape != b.shape or a.dtype != b.dtype:
            return None
        if a.op == "reshape" and b.op == "reshape":
            x, y = a.inputs[0], b.inputs[0]
            if not (x.op == y.op == "cat" and x.shape == y.shape and node.dtype == x.dtype):
                return None
            total = self.emit("add", (x, y), x.type, node.origin)
            return self.emit("reshape", (total,), node.type, node.origin)
        if a.op != "cat" or b.op != "cat":
            return None
        dim = a.attrs["dim"]
        if dim != b.attrs["dim"] or a.dtype != b.dtype or a.dtype != node.dtype:
            return None
        pieces = _nonzero(a) + _nonzero(b)
        if any(not isinstance(start, int) for start, _ in pieces):
            return None
        pieces.sort(key=lambda p: p[0])
        parts: list[Node] = []
        at = 0
        for start, part in pieces:
            if not isinstance(at, int) or start < at:  # what follows a run-time extent may overlap
                return None
            if start > at:
                parts.append(self._zeros(node, dim, start - at))
            parts.append(part)
            at = start + part.shape[dim]
        if node.shape[dim] != at:
            parts.append(self._zeros(node, dim, node.shape[dim] - at))
        return self.emit("cat", tuple(parts), node.type, node.origin, dim=dim)

    def _zeros(self, like: Node, dim: int, extent: Dim) -> Node:
        shape = tuple(extent if i == dim else s for i, s in enumerate(like.shape))
        return self.emit("full", (), TensorType(shape, like.dtype), like.origin, value=0)

    def _cast_of_sum(self, node: Node, x: Node) -> Node | None:
        total = x.args[0] if x.op == "reshape" else x
        if not (isinstance(total, Node) and total.op == "sum" and total.dtype == torch.float32):
            return None
        if not (self._single(x) and self._single(total)):
            return None
        rounded = self.emit("sum", total.args, TensorType(total.shape, node.dtype), total.origin,
                            **total.attrs)  # fmt: skip
        if x is total:
            return rounded
        return self.emit("reshape", (rounded,), node.type, node.origin)

    def _sum(self, node: Node, x: Node) -> Node | None:
        dims = tuple(d for d in node.attrs["dims"] if x.shape[d] != 1)
        if dims != node.attrs["dims"]:
            if dims:
                return self.emit("sum", (x,), node.type, node.origin, dims=dims)
            return x if x.dtype == node.dtype else self.emit("cast", (x,), node.type, node.origin)
        if x.op == "cat" and x.attrs["dim"] not in dims:
            parts = []
            for part in x.inputs:
                shape = tuple(1 if i in dims else s for i, s in enumerate(part.shape))
                parts.append(self.emit("sum", (part,), TensorType(shape, node.dtype), node.origin,
                                       dims=dims))  # fmt: skip
            return self.emit("cat", tuple(parts), node.type, node.origin, dim=x.attrs["dim"])
        straight = None if _trailing(x, dims) else _unturned(x, dims)
        if straight is not None:
            y, own = straight
            shape = tuple(1 if i in own else s for i, s in enumerate(y.shape))
            total = self.emit("sum", (y,), TensorType(shape, node.dtype), node.origin, dims=own)
            return self.emit("reshape", (total,), node.type, node.origin)
        inner = _trailing(x, dims)
        if inner and len(inner) < len(dims):
            shape = tuple(1 if i in inner else s for i, s in enumerate(x.shape))
            partial = self.emit("sum", (x,), TensorType(shape, torch.float32), node.origin,
                                dims=inner)  # fmt: skip
            outer = tuple(d for d in dims if d not in inner)
            return self.emit("sum", (partial,), node.type, node.origin, dims=outer)
        return None


def _nonzero(cat: Node) -> list[tuple[Dim, Node]]:
    """(start, part) of the parts of a concatenation that are not all zero."""
    found, at = [], 0
    for part in cat.inputs:
        if not (part.op == "full" and part.attrs["value"] == 0):
            found.append((at, part))
        at = at + part.shape[cat.attrs["dim"]]
    return found


def _unturned(x: Node, dims: tuple[int, ...]) -> tuple[Node, tuple[int, ...]] | None:
    """(y, dims of y) whose sum has the same elements in the same order, where `x` is a permutation
    of y, perhaps reshaped, and y ends in dims summed over: they are then sums along rows."""
    turned = x.inputs[0] if x.op == "reshape" else x
    if turned.op != "permute":
        return None
    y, order = turned.inputs[0], turned.attrs["order"]
    groups = _groups(turned.shape, x.shape)
    if groups is None:
        return None
    own = tuple(sorted(order[i] for d in dims for i in groups[d]))
    left = [i for i in range(len(y.shape)) if i not in own and y.shape[i] != 1]
    kept = [order[i] for i in range(len(order)) if order[i] in left]
    return (y, own) if kept == left and _trailing(y, own) else None


def _groups(fine: Sequence[Dim], coarse: Sequence[Dim]) -> list[list[int]] | None:
    """Which extents of `fine` make up each of `coarse`; None where one is cut."""
    groups: list[list[int]] = []
    i = 0
    for extent in coarse:
        groups.append([])
        total: Dim = 1
        while total != extent and i < len(fine):
            total = as_dim(total * fine[i])
            groups[-1].append(i)
            i += 1
        if total != extent:
            return None
    return groups if all(e == 1 for e in fine[i:]) else None


def _trailing(x: Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dims of `dims` that form the innermost run of `x`'s extents other than 1 and are known
    when kernels are compiled."""
    inner: list[int] = []
    for d in reversed(range(len(x.shape))):
        if d in dims and isinstance(x.shape[d], int):
            inner.insert(0, d)
        elif x.shape[d] != 1:
            break
    return tuple(inner)


def simplify(graph: Graph) -> Graph:
    while True:
        uses = {n: len(u) for n, u in graph.users().items()}
        for out in graph.outputs:
            if out is not None:
                uses[out] += 1
        sweep = Simplify(uses)
        graph = sweep.run(graph)
        if not sweep.changed:
            return graph
