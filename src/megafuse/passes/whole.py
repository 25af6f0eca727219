"""A 16-bit product and its bias in one PyTorch call, where it was one.

Before → after, for products whose own kernel does not add the bias:
    add(reshape(matmul(a, b)), bias)     → reshape(addmm(bias, a, b))
    add(matmul(a, b), row)               → baddbmm(row, a, b)

PyTorch's addmm adds before it rounds. Apart, the product rounds first: then a sum near zero may
have the wrong sign, and a ReLU behind it another gradient than eager's. Sums that eager makes by
an operator of its own stay apart, where the walk that follows makes them for nothing.
"""

from __future__ import annotations

from megafuse.ir import Arg, Graph, Node, Ref, Rewriter, TensorType
from megafuse.passes.additions import HALVES, Addition, additions, pulled, restored


class WholeProducts(Rewriter):
    name = "whole"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.users = graph.users()
        self.outputs = set(graph.outputs)
        self._alone: set[Node] = set()

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        made = self._whole(node, args) or self.keep(node, args)
        if len(self.users[node]) == 1 and node not in self.outputs:
            self._alone.add(made)
        return made

    def _whole(self, node: Node, args: tuple[Arg, ...]) -> Node | None:
        if not node.attrs.get("bias") or node.dtype not in HALVES or len(node.inputs) != 2:
            return None
        a, b = args
        assert isinstance(a, Node) and isinstance(b, Node)
        for addition in additions(a, b, self._alone.__contains__):
            seen = addition.views[-1] if addition.views else addition.product
            if seen.shape != node.shape or addition.other.dtype != node.dtype:
                continue
            if "epilogue" in addition.product.attrs:
                continue
            extra = pulled(addition, self)
            if extra is not None and extra[0] == "row":
                return restored(self._call(addition, extra[1], node), addition, self)
        return None

    def _call(self, addition: Addition, bias: Node, node: Node) -> Node:
        """The product with its bias as one extern call, in the product's shape."""
        product = addition.product
        operands = (bias, *product.inputs)
        batch, m, n = product.shape
        target, type = "aten.baddbmm.default", product.type
        if batch == 1:  # PyTorch adds a vector inside the product, a broadcast matrix before it
            target, type = "aten.addmm.default", TensorType((m, n), product.dtype)
            operands = tuple(
                self.emit("reshape", (x,), TensorType(shape, x.dtype), x.origin)
                for x, shape in zip(
                    operands, ((n,), *(i.shape[1:] for i in product.inputs)), strict=True
                )
            )
        attrs = {"target": target, "call_args": [Ref(0), Ref(1), Ref(2)], "call_kwargs": {},
                 "multiple": False}  # fmt: skip
        call = self._append(Node("call", "extern", operands, type, attrs, node.origin))
        if batch != 1:
            return call
        return self.emit("reshape", (call,), product.type, node.origin)


def whole_products(graph: Graph) -> Graph:
    return WholeProducts(graph).run(graph)
