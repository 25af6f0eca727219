"""What is computed from a concatenation is computed from its parts, so that it is not stored first.

Before → after, d the dimension of the concatenation:
    f(cat(a, b, d), x)          → cat(f(a, x[:k]), f(b, x[k:]), d)      f pointwise
    permute(cat(a, b, d))       → cat(permute(a), permute(b), d')
    reshape(cat(a, b, d))       → cat(reshape(a), reshape(b), d')       the parts stay whole
    slice(cat(a, b, d), in b)   → slice(b)
    cat(cat(a, b, d), c, d)     → cat(a, b, c, d)

Only where every reader can do so, and nothing computed from them needs whole rows: then the walk
over those rows reads the concatenation better than its parts. Rotary embedding and the gradients of
packed weights live on this.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.index import at_least_zero, quotient
from megafuse.ir import Arg, Dim, Graph, Node, Rewriter, TensorType, as_dim, product
from megafuse.ops import is_pointwise, is_reduction, is_view
from megafuse.passes.dce import dce
from megafuse.passes.operands import layout_of

MOST_PARTS = 4
"""Each operator is emitted once a part; more parts than these cost more code than the store."""


class Pieces(Rewriter):
    """One sweep."""

    name = "pieces"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        outputs = set(graph.outputs)
        users = graph.users()
        in_rows = _needed_in_rows(graph, users)
        self.open = {
            n for n in graph.nodes
            if n.op == "cat" and len(n.inputs) <= MOST_PARTS and n not in outputs | in_rows
            and users[n] and all(_takes_parts(u, n) for u in users[n])
            and _views_gain([u for u in users[n] if u.op in ("permute", "reshape")], users)
        }  # fmt: skip
        self.changed = False

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        opened = [n for n in node.inputs if n in self.open]
        if not opened:
            return self.keep(node, args)
        self.changed = True
        cat = self.map[opened[0]]
        match node.op:
            case "permute":
                return self._permute(node, cat)
            case "reshape":
                return self._reshape(node, cat)
            case "slice":
                return self._slice(node, cat)
            case "cat":
                flat: list[Arg] = []
                for old, new in zip(node.inputs, args, strict=True):
                    assert isinstance(new, Node)
                    flat += new.args if old in self.open else (new,)
                return self.keep(node, tuple(flat))
        return self._pointwise(node, args, cat)

    def _permute(self, node: Node, cat: Node) -> Node:
        order = node.attrs["order"]
        parts = tuple(
            self.emit("permute", (p,), TensorType(tuple(p.shape[i] for i in order), p.dtype),
                      node.origin, order=order)
            for p in cat.inputs
        )  # fmt: skip
        dim = order.index(cat.attrs["dim"])
        return self.emit("cat", parts, node.type, node.origin, dim=dim)

    def _reshape(self, node: Node, cat: Node) -> Node:
        place = _new_place(cat, node.shape)
        assert place is not None
        dim, extents = place
        parts = []
        for p, extent in zip(cat.inputs, extents, strict=True):
            shape = (*node.shape[:dim], extent, *node.shape[dim + 1 :])
            parts.append(self.emit("reshape", (p,), TensorType(shape, p.dtype), node.origin))
        return self.emit("cat", tuple(parts), node.type, node.origin, dim=dim)

    def _slice(self, node: Node, cat: Node) -> Node:
        found = _part_of_slice(node, cat)
        assert found is not None
        part, start = found
        a = node.attrs
        if start == 0 and part.shape == node.shape:
            return part
        moved = {**a, "start": start, "stop": as_dim(start + a["stop"] - a["start"])}
        return self.emit("slice", (part,), node.type, node.origin, **moved)

    def _pointwise(self, node: Node, args: tuple[Arg, ...], cat: Node) -> Node:
        dim, rank = cat.attrs["dim"], len(node.shape)
        parts, start = [], 0
        for p in cat.inputs:
            stop = as_dim(start + p.shape[dim])
            mine = tuple(self._cut(a, dim, start, stop, rank, p.shape[dim]) for a in args)
            shape = (*node.shape[:dim], p.shape[dim], *node.shape[dim + 1 :])
            parts.append(
                self._append(replace(node, args=mine, type=TensorType(shape, node.dtype),
                                     attrs=dict(node.attrs)))
            )  # fmt: skip
            start = stop
        return self.emit("cat", tuple(parts), node.type, node.origin, dim=dim)

    def _cut(self, value: Arg, dim: int, start: Dim, stop: Dim, rank: int, extent: Dim) -> Arg:
        """The part of an operand from `start` to `stop` along dimension `dim` of the result."""
        if not isinstance(value, Node):
            return value
        own = dim - (rank - len(value.shape))
        if own < 0 or value.shape[own] == 1:
            return value
        if value.op == "cat" and value.attrs["dim"] == own:
            at: Dim = 0
            for part in value.inputs:
                if at == start and part.shape[own] == extent:
                    return part
                at = as_dim(at + part.shape[own])
        shape = (*value.shape[:own], extent, *value.shape[own + 1 :])
        return self.emit("slice", (value,), TensorType(shape, value.dtype), value.origin,
                         dim=own, start=start, stop=stop, step=1)  # fmt: skip


def _needed_in_rows(graph: Graph, users: dict[Node, list[Node]]) -> set[Node]:
    """Nodes that a reduction along a row reads, directly or through what is computed of them."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        for user in users[node]:
            if is_reduction(user):
                wide = [d for d, extent in enumerate(node.shape) if extent != 1]
                if wide and wide[-1] in user.attrs["dims"]:
                    found.add(node)
            elif user in found and (is_pointwise(user) or is_view(user)):
                found.add(node)
    return found


def _views_gain(views: list[Node], users: dict[Node, list[Node]]) -> bool:
    """Whether a concatenation is better stored as its one view has it: more arithmetic follows, or
    a reader that cannot take the view by strides. Two views would mean two stores."""
    if not views:
        return True

    def gains(view: Node) -> bool:
        for user in users[view]:
            if is_pointwise(user) or is_reduction(user) or (is_view(user) and gains(user)):
                return True
            if user.op in ("matmul", "extern"):
                layout = layout_of(view)
                if layout is None or not layout.strided:
                    return True
        return False

    return len(views) == 1 and gains(views[0])


def _takes_parts(user: Node, cat: Node) -> bool:
    match user.op:
        case "permute":
            return True
        case "reshape":
            return _new_place(cat, user.shape) is not None
        case "slice":
            return _part_of_slice(user, cat) is not None
        case "cat":
            return user.attrs["dim"] == cat.attrs["dim"]
    return is_pointwise(user) and user.shape == cat.shape


def _new_place(cat: Node, shape: tuple[Dim, ...]) -> tuple[int, list[Dim]] | None:
    """(dimension, extent of each part along it) where a reshape of `cat` to `shape` keeps its parts
    whole."""
    dim = cat.attrs["dim"]
    before, inner = product(cat.shape[:dim]), product(cat.shape[dim + 1 :])
    for place in range(len(shape)):
        if as_dim(product(shape[:place]) - before) != 0:
            continue
        tail = product(shape[place + 1 :])
        extents = [quotient(as_dim(p.shape[dim] * inner), tail) for p in cat.inputs]
        if all(e is not None for e in extents):
            return place, extents  # type: ignore[return-value]
    return None


def _part_of_slice(node: Node, cat: Node) -> tuple[Node, Dim] | None:
    """(the part that a slice of `cat` lies in, where it starts there)."""
    a, dim = node.attrs, cat.attrs["dim"]
    if a["dim"] != dim:
        return None
    at: Dim = 0
    for part in cat.inputs:
        end = as_dim(at + part.shape[dim])
        if at_least_zero(as_dim(a["start"] - at)) and at_least_zero(as_dim(end - a["stop"])):
            return part, as_dim(a["start"] - at)
        at = end
    return None


def pieces(graph: Graph) -> Graph:
    while True:
        graph = dce(graph)
        sweep = Pieces(graph)
        graph = sweep.run(graph)
        if not sweep.changed:
            return graph
