"""Products done apart for each token (or group, or head) become one batched product.

Before → after, for x_i = x[:, i] and three or more products of one form:
    stack(f(x_i @ w_i + b_i))    → f(x @ stack(w) + stack(b))      x seen as [tokens, batch, d]
    sum(g_i), one for each i     → the slices of one sum
    cat(f(x[:k]), f(x[k:]))      → f(x)

Members of a set compute the same expression on consecutive slices of one tensor. Only parameters
and other inputs are stacked by a copy; what shares an operand (several heads on one input) stays
apart, for there is nothing to slice.

Only 16-bit products are batched: our own kernel sums each in the same order, alone or in a batch.
Float32 ones are PyTorch's, and cuBLAS has another kernel for a batch, with twice the error of those
that eager runs one by one; they stay apart as eager has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megafuse.ir import Arg, Graph, Node, Origin, Ref, Rewriter, TensorType, as_dim
from megafuse.ops import is_pointwise
from megafuse.passes.additions import HALVES

FEWEST = 3
"""Members worth a copy of their parameters."""


class _Different(Exception):
    """The nodes are not one expression on consecutive slices."""


class Batch(Rewriter):
    name = "batch"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.lifted: dict[tuple[Node, ...], tuple[Node, bool]] = {}
        self.sliced = False
        self.place = Origin()
        self.sets = _sets(graph)

    def run(self, graph: Graph) -> Graph:
        ordered = Graph(graph.inputs, _ordered(graph, self.sets), graph.outputs)
        return super().run(ordered)

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node in self.map:  # done with the first of its set
            return self.map[node]
        members = self.sets.get(node)
        if members is not None:
            try:
                self._together(members)
                return self.map[node]
            except _Different:
                for member in members:
                    self.map[member] = self.keep(member, self.mapped(member.args))
                return self.map[node]
        if node.op == "cat":
            try:
                return self._cat(node, [a for a in args if isinstance(a, Node)])
            except _Different:
                pass
        return self.keep(node, args)

    def _together(self, members: Sequence[Node]) -> None:
        """One product or sum for all members, which become its slices."""
        operands = {m: tuple(self.map[i] for i in m.inputs) for m in members}
        members = sorted(members, key=lambda m: _starts(operands[m]))
        first, count = members[0], len(members)
        self.place = first.origin
        columns = list(zip(*(operands[m] for m in members), strict=True))
        if any(len(set(c)) < count for c in columns):
            raise _Different
        x = self._lift_slices(columns[0])
        if first.op == "matmul":
            a, b = (self._reshaped(v, (count, *v.shape[2:])) for v in (x, self._lift(columns[1])))
            shape = (count, *first.shape[1:])
            whole = self.emit("matmul", (a, b), TensorType(shape, first.dtype), first.origin)
        else:
            dims = tuple(d + 1 for d in first.attrs["dims"])
            type = TensorType((count, *first.shape), first.dtype)
            whole = self.emit("sum", (x,), type, first.origin, dims=dims)
        for i, member in enumerate(members):
            shape = (1, *whole.shape[1:])
            part = self.emit("slice", (whole,), TensorType(shape, whole.dtype), member.origin,
                             dim=0, start=i, stop=i + 1, step=1)  # fmt: skip
            self.map[member] = self._reshaped(part, member.shape)

    def _cat(self, node: Node, parts: list[Node]) -> Node:
        self.place = node.origin
        dim, count = node.attrs["dim"], len(parts)
        if len({p.type for p in parts}) > 1 or len(set(parts)) < count:
            raise _Different
        whole = self._lift_slices(tuple(parts))
        rank = len(node.shape)
        order = (*range(1, dim + 1), 0, *range(dim + 1, rank + 1))
        return self._reshaped(self._permuted(whole, order), node.shape)

    # -- the same expression for all members, over [members, *shape]

    def _lift_slices(self, nodes: tuple[Node, ...]) -> Node:
        """As _lift, for nodes that come from consecutive slices of something."""
        self.sliced = False
        whole = self._lift(nodes)
        if not self.sliced:
            raise _Different
        return whole

    def _lift(self, nodes: tuple[Node, ...]) -> Node:
        """`nodes` stacked in a new outermost dimension. Raises _Different."""
        if nodes not in self.lifted:
            outer, self.sliced = self.sliced, False
            self.lifted[nodes] = self._lifted(nodes), self.sliced
            self.sliced |= outer
        whole, sliced = self.lifted[nodes]
        self.sliced |= sliced
        return whole

    def _lifted(self, nodes: tuple[Node, ...]) -> Node:
        first, count = nodes[0], len(nodes)
        shape = (count, *first.shape)
        type = TensorType(shape, first.dtype)
        if len(set(nodes)) == 1:
            return self.emit("expand", (self._reshaped(first, (1, *first.shape)),), type,
                             first.origin)  # fmt: skip
        if any(n.op != first.op or n.type != first.type for n in nodes):
            raise _Different
        if first.op == "input":
            if any(not isinstance(d, int) for d in first.shape):
                raise _Different  # as large as the batch: a copy costs what it saves
            refs = [Ref(i) for i in range(count)]
            attrs = {"target": "aten.stack.default", "call_args": [refs, 0], "call_kwargs": {},
                     "multiple": False}  # fmt: skip
            origin = replace(self.place, op="aten.stack")
            return self._append(Node("stack", "extern", nodes, type, attrs, origin))
        if first.op == "slice" and len({n.attrs["start"] for n in nodes}) > 1:
            return self._consecutive(nodes)
        if any(n.attrs != first.attrs for n in nodes):
            raise _Different
        match first.op:
            case "reshape":
                return self._reshaped(self._lift(_operands(nodes, 0)), shape)
            case "permute":
                order = (0, *(d + 1 for d in first.attrs["order"]))
                return self._permuted(self._lift(_operands(nodes, 0)), order)
            case "expand":
                return self.emit("expand", (self._lift(_operands(nodes, 0)),), type, first.origin)
            case "slice":
                attrs = {**first.attrs, "dim": first.attrs["dim"] + 1}
                x = self._lift(_operands(nodes, 0))
                return self.emit("slice", (x,), type, first.origin, **attrs)
        if not is_pointwise(first) or not first.args:
            raise _Different
        args = tuple(self._argument(nodes, i, len(first.shape)) for i in range(len(first.args)))
        return self._append(replace(first, args=args, type=type, attrs=dict(first.attrs)))

    def _argument(self, nodes: tuple[Node, ...], index: int, rank: int) -> Arg:
        values = [n.args[index] for n in nodes]
        if not isinstance(values[0], Node):
            if any(v != values[0] for v in values):
                raise _Different
            return values[0]
        if any(not isinstance(v, Node) for v in values):
            raise _Different
        x = self._lift(_operands(nodes, index))
        missing = rank + 1 - len(x.shape)
        return self._reshaped(x, (x.shape[0], *[1] * missing, *x.shape[1:]))

    def _consecutive(self, nodes: tuple[Node, ...]) -> Node:
        """Slices that follow one another in one tensor: a view of it."""
        self.sliced = True
        first, count = nodes[0], len(nodes)
        base, a = first.inputs[0], first.attrs
        dim, extent = a["dim"], first.shape[a["dim"]]
        for i, n in enumerate(nodes):
            at = as_dim(a["start"] + i * extent)
            if n.inputs[0] is not base or n.attrs["dim"] != dim or n.attrs["step"] != 1:
                raise _Different
            if as_dim(n.attrs["start"] - at) != 0:
                raise _Different
        whole = as_dim(count * extent)
        if base.shape[dim] != whole:
            shape = (*base.shape[:dim], whole, *base.shape[dim + 1 :])
            stop = as_dim(a["start"] + whole)
            base = self.emit("slice", (base,), TensorType(shape, base.dtype), first.origin,
                             dim=dim, start=a["start"], stop=stop, step=1)  # fmt: skip
        cut = self._reshaped(base, (*base.shape[:dim], count, extent, *base.shape[dim + 1 :]))
        rest = [d for d in range(len(cut.shape)) if d != dim]
        return self._permuted(cut, (dim, *rest))

    def _reshaped(self, x: Node, shape: Sequence[object]) -> Node:
        if x.shape == tuple(shape):
            return x
        return self.emit("reshape", (x,), TensorType(tuple(shape), x.dtype), x.origin)  # type: ignore[arg-type]

    def _permuted(self, x: Node, order: tuple[int, ...]) -> Node:
        if order == tuple(range(len(order))):
            return x
        shape = tuple(x.shape[i] for i in order)
        return self.emit("permute", (x,), TensorType(shape, x.dtype), x.origin, order=order)


def _operands(nodes: tuple[Node, ...], index: int) -> tuple[Node, ...]:
    found = tuple(n.args[index] for n in nodes)
    assert all(isinstance(f, Node) for f in found)
    return found  # type: ignore[return-value]


def _starts(nodes: Sequence[Node]) -> list[int]:
    """Where the first slices under a member's operands start: the order of members."""
    found: list[int] = []
    stack = list(reversed(nodes))
    while stack and len(found) < 4:
        node = stack.pop()
        if node.op == "slice" and isinstance(node.attrs["start"], int):
            found.append(node.attrs["start"])
        elif is_pointwise(node) or node.op in ("reshape", "permute", "expand"):
            stack.extend(reversed(node.inputs))
    return found


def _sets(graph: Graph) -> dict[Node, list[Node]]:
    """16-bit products, and sums over rows, that are one expression but for the slices and inputs
    they start from; by member."""
    forms: dict[object, int] = {}
    form_of: dict[Node, int] = {}
    by_form: dict[int, list[Node]] = {}
    for node in graph.nodes:
        attrs = dict(node.attrs)
        for name in ("start", "stop", "index", "role"):
            attrs.pop(name, None)
        args = tuple(form_of[a] if isinstance(a, Node) else repr(a) for a in node.args)
        form: object = (node.op, node.type, args, repr(sorted(attrs.items())))
        if node.op in ("extern", "item"):
            form = node
        form_of[node] = forms.setdefault(form, len(forms))
        single = node.op == "matmul" and node.shape[0] == 1 and len(node.inputs) == 2
        rows = node.op == "sum" and len(node.shape) - 1 not in node.attrs["dims"]
        if rows or (single and node.dtype in HALVES):
            by_form.setdefault(form_of[node], []).append(node)
    return {m: s for s in by_form.values() if len(s) >= FEWEST for m in s}


def _ordered(graph: Graph, sets: dict[Node, list[Node]]) -> list[Node]:
    """The graph's nodes with each set after all that its members need. Members never depend on one
    another: none is part of an expression of its own form."""
    done: set[Node] = set()
    result: list[Node] = []
    for root in graph.nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            group = sets.get(node, [node])
            waiting = [i for m in group for i in m.inputs if i not in done]
            if waiting:
                stack.extend(waiting)
                continue
            for member in group:
                done.add(member)
                result.append(member)
    return result


def batch(graph: Graph) -> Graph:
    return Batch(graph).run(graph)
