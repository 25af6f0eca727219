"""Additions that a product's own kernel can make before its result reaches memory.

Before → after, for executors that have such an epilogue (16-bit products on Hopper):
    add(matmul(a, b), row)                  → matmul(a, b, row)               row: [batch, 1, n]
    add(x, permute(matmul(a, b)))           → permute(matmul(a, b, unpermute(x)))

Each extra operand is read once a tile; the value is rounded once. Only products that nothing else
reads are touched. Not run for rounding="eager", where each addition rounds.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megafuse.ir import Arg, Graph, Node, Rewriter, TensorType

MOST_ROWS, MOST_TENSORS = 2, 1


class FuseEpilogues(Rewriter):
    """One sweep; chains of additions need one sweep each."""

    name = "epilogue"

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        users = graph.users()
        outputs = [o for o in graph.outputs if o is not None]
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
        if node.dtype not in (torch.bfloat16, torch.float16) or len(node.inputs) != 2:
            return None
        for product, other in ((args[0], args[1]), (args[1], args[0])):
            assert isinstance(product, Node) and isinstance(other, Node)
            order: tuple[int, ...] = tuple(range(len(node.shape)))
            core = product
            if core.op == "permute" and core in self._new_single:
                order = core.attrs["order"]
                core = core.inputs[0]
            if core.op != "matmul" or core not in self._new_single or product.shape != node.shape:
                continue
            extra = self._operand(other, order, core)
            if extra is None:
                continue
            kind, operand = extra
            steps = (*core.attrs.get("epilogue", ()), kind)
            if steps.count("row") > MOST_ROWS or steps.count("tensor") > MOST_TENSORS:
                continue
            result = self._append(replace(
                core, args=(*core.args, operand), attrs={**core.attrs, "epilogue": steps},
            ))  # fmt: skip
            if product is core:
                return result
            self._new_single.add(result)
            return self.emit("permute", (result,), node.type, node.origin, order=order)
        return None

    def _operand(
        self, x: Node, order: tuple[int, ...], product: Node
    ) -> tuple[str, Node] | None:
        """(kind, node) of `x` seen in the product's own axes, or None when it fits no step."""
        rank = len(product.shape)
        if x.dtype != product.dtype or len(x.shape) != rank:
            return None
        inverse = tuple(order.index(i) for i in range(rank))
        shape = tuple(x.shape[i] for i in inverse)
        batch, m, n = product.shape
        if shape == (batch, m, n):
            kind = "tensor"
        elif shape == (batch, 1, n):
            kind = "row"
        else:
            return None
        if inverse != tuple(range(rank)):
            x = self.emit("permute", (x,), TensorType(shape, x.dtype), x.origin, order=inverse)
        return kind, x


def fuse_epilogues(graph: Graph) -> Graph:
    while True:
        sweep = FuseEpilogues(graph)
        graph = sweep.run(graph)
        if not sweep.changed:
            return graph
