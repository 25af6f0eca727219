"""Additions that a product's own kernel can make before its result reaches memory.

Before → after, for executors that have such an epilogue (16-bit products on Hopper):
    add(matmul(a, b), row)                  → matmul(a, b, row)               row: [batch, 1, n]
    add(x, permute(matmul(a, b)))           → permute(matmul(a, b, unpermute(x)))
    add(reshape(matmul(a, b)), bias)        → reshape(matmul(a, b, row))      a linear layer

Each extra operand is read once a tile; the value is rounded once. Only products that nothing else
reads are touched, and only such as the copy engine can address. Not run for rounding="eager",
where each addition rounds.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.ir import Arg, Graph, Node, Rewriter, walk
from megafuse.ops import is_pointwise, is_view
from megafuse.passes.additions import HALVES, Addition, additions, pulled, restored
from megafuse.passes.operands import layout_of

MOST_ROWS, MOST_TENSORS = 2, 1
PIECE = 8  # elements of 16 bits that the copy engine moves whole


class FuseEpilogues(Rewriter):
    """One sweep; chains of additions need one sweep each."""

    name = "epilogue"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.users = users = graph.users()
        self.outputs = outputs = {o for o in graph.outputs if o is not None}
        self.single = {n for n in graph.nodes if len(users[n]) == 1 and n not in outputs}
        self.changed = False
        self._new_single: set[Node] = set()

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        made = self._fuse(node, args) if node.op == "add" else None
        if made is None:
            made = self.keep(node, args)
        else:
            self.changed = True
        if node in self.single:
            self._new_single.add(made)
        return made

    def _fuse(self, node: Node, args: tuple[Arg, ...]) -> Node | None:
        if node.dtype not in HALVES:
            return None
        for addition in additions(node, args, self._new_single.__contains__):
            if not _addressable(addition):
                continue
            extra = pulled(addition, self)
            if extra is None:
                continue
            kind, operand = extra
            if kind == "tensor" and not (self._in_memory(node, addition) and readable(operand)):
                continue
            core = addition.product
            steps = (*core.attrs.get("epilogue", ()), kind)
            if steps.count("row") > MOST_ROWS or steps.count("tensor") > MOST_TENSORS:
                continue
            result = self._append(replace(
                core, args=(*core.args, operand), attrs={**core.attrs, "epilogue": steps},
            ))  # fmt: skip
            self._new_single.add(result)
            whole = restored(result, addition, self)
            self._new_single |= set(_views(whole, result))
            return whole
        return None

    def _in_memory(self, node: Node, addition: Addition) -> bool:
        """Whether a tensor operand is stored anyway, or long computed when the product is made of
        it. What is only computed for this addition is better added in the walk that computes it."""
        base = next(i for i in node.inputs if self.map[i] is addition.other)
        product = next(i for i in node.inputs if i is not base)
        while is_view(base):
            base = base.inputs[0]
        return not is_pointwise(base) or self._stored(base) or base in walk([product])

    def _stored(self, node: Node) -> bool:
        return node in self.outputs or any(
            user.op in ("matmul", "extern") or (is_view(user) and self._stored(user))
            for user in self.users[node]
        )


def readable(operand: Node) -> bool:
    """Whether a tensor operand is read by strides, its rows whole, and not copied first."""
    layout = layout_of(operand)
    return layout is not None and layout.strided and layout.dense(len(layout.dims) - 1)


def _views(node: Node, base: Node) -> list[Node]:
    found = []
    while node is not base:
        node = node.inputs[0]
        found.append(node)
    return found


def _addressable(addition: Addition) -> bool:
    """Whether the extents known now suit the kernel; another product would go back to PyTorch,
    which has no epilogue."""
    known = (addition.product.shape[2], addition.product.inputs[0].shape[2])
    return all(not isinstance(d, int) or d % PIECE == 0 for d in known)


def fuse_epilogues(graph: Graph) -> Graph:
    while True:
        sweep = FuseEpilogues(graph)
        graph = sweep.run(graph)
        if not sweep.changed:
            return graph
