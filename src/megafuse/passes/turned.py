"""Products whose results are only read transposed.

Before → after, for 16-bit products:
    permute(matmul(a, b), last two swapped)     → matmul(bᵀ, aᵀ)

Operand transposes are addressing; a transposed result would be read across its rows, by a kernel
that does little else. The gradient of kᵀ in an attention written out is one.
"""

from __future__ import annotations

from megafuse.ir import Arg, Graph, Node, Rewriter, TensorType
from megafuse.passes.additions import HALVES

SWAPPED = (0, 2, 1)


class Turned(Rewriter):
    name = "turned"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.users = graph.users()
        self.outputs = {o for o in graph.outputs if o is not None}

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        product = self._product(node) if node.op == "permute" else None
        if product is None:
            return self.keep(node, args)
        a, b = (self.map[i] for i in product.inputs)
        batch, m, n = product.shape
        left, right = (self._swapped(x) for x in (b, a))
        turned = self.emit(
            "matmul", (left, right), TensorType((batch, n, m), product.dtype), product.origin
        )
        if node.shape == turned.shape:
            return turned
        return self.emit("reshape", (turned,), node.type, node.origin)

    def _product(self, node: Node) -> Node | None:
        """The product that `node` turns, if nothing else reads it and somebody computes with it."""
        rank = len(node.shape)
        if rank < 3 or node.attrs["order"] != (*range(rank - 2), rank - 1, rank - 2):
            return None
        inner = node.inputs[0]
        product = inner.inputs[0] if inner.op == "reshape" else inner
        if product.op != "matmul" or product.attrs.get("epilogue") or product.dtype not in HALVES:
            return None
        if inner.shape[-2:] != product.shape[-2:]:
            return None
        if any(len(self.users[x]) != 1 or x in self.outputs for x in {inner, product}):
            return None
        return product if not all(u.op == "matmul" for u in self.users[node]) else None

    def _swapped(self, x: Node) -> Node:
        if x.op == "permute" and x.attrs["order"] == SWAPPED:
            return x.inputs[0]
        batch, rows, columns = x.shape
        return self.emit(
            "permute", (x,), TensorType((batch, columns, rows), x.dtype), x.origin, order=SWAPPED
        )


def turned_products(graph: Graph) -> Graph:
    return Turned(graph).run(graph)
