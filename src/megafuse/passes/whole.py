"""A product and its bias in one step, where they are one PyTorch call.

Before → after, for sums that addmm, baddbmm or a linear layer makes:
    add(reshape(matmul(a, b)), bias)     → reshape(matmul(a, b, row))
    add(matmul(a, b), tensor)            → matmul(a, b, tensor)

PyTorch's addmm adds before it rounds. Apart, the product rounds first: float32 then has a rounding
more than eager, and in 16 bits a sum near zero may have the wrong sign, and a ReLU behind it
another gradient. Where PyTorch computes the product the executor calls what eager calls. Sums
that eager makes by an operator of its own stay apart, where the walk that follows makes them for
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.ir import Arg, Graph, Node, Rewriter
from megafuse.passes.additions import additions, pulled, restored
from megafuse.passes.epilogue import readable


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
        if not node.attrs.get("bias"):
            return None
        for addition in additions(node, args, self._alone.__contains__):
            core = addition.product
            if "epilogue" in core.attrs:
                continue
            extra = pulled(addition, self)
            if extra is None or (extra[0] == "tensor" and not readable(extra[1])):
                continue
            kind, operand = extra
            whole = replace(
                core, args=(*core.args, operand), attrs={**core.attrs, "epilogue": (kind,)},
                origin=node.origin,
            )  # fmt: skip
            return restored(self._append(whole), addition, self)
        return None


def whole_products(graph: Graph) -> Graph:
    return WholeProducts(graph).run(graph)
