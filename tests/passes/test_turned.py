"""Products that are only read transposed are computed transposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import GraphBuilder, ops_of
from torch import Tensor

import megafuse
from megafuse.ir import Dim, Graph, Node
from megafuse.passes.dce import dce
from megafuse.passes.turned import turned_products
from megafuse.runtime.reference import interpret


class Halves(GraphBuilder):
    def input(self, *shape: Dim, dtype: torch.dtype = torch.bfloat16) -> Node:
        return super().input(*shape, dtype=dtype)


def built(g: GraphBuilder, use: Callable[[Node], Node]) -> Graph:
    a = g.permute(g.input(6, 5, 4), 0, 2, 1)
    m = g.op("matmul", a, g.input(6, 5, 3), shape=(6, 4, 3))
    return g.graph(use(m))


def test_the_operands_change_places() -> None:
    g = Halves()
    before = built(g, lambda m: g.op("neg", g.permute(g.reshape(m, 2, 3, 4, 3), 0, 1, 3, 2)))
    after = dce(turned_products(before))
    # bᵀ is a permutation more, (aᵀ)ᵀ one less, and so is the result.
    assert ops_of(after) == ["permute", "matmul", "reshape", "neg"]
    args = [torch.randn(6, 5, 4).bfloat16(), torch.randn(6, 5, 3).bfloat16()]
    assert torch.equal(interpret(before)(*args)[0], interpret(after)(*args)[0])


@pytest.mark.parametrize("case", ["float32", "read twice", "another order", "for a product"])
def test_others_stay(case: str) -> None:
    g = GraphBuilder() if case == "float32" else Halves()

    def use(m: Node) -> Node:
        turned = g.permute(m, *((1, 0, 2) if case == "another order" else (0, 2, 1)))
        if case == "for a product":
            return g.op("matmul", g.input(6, 7, 3), turned, shape=(6, 7, 4))
        result = g.op("neg", turned)
        if case == "read twice":
            g.op("exp", m)
        return result

    before = built(g, use)
    assert ops_of(turned_products(before)) == ops_of(before)


def test_an_attention_written_out() -> None:
    """The gradient of k leaves its product as k lies: no kernel only turns it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    q, k, v = (torch.randn(2, 3, 8, 4).bfloat16().requires_grad_() for _ in range(3))
    compiled = megafuse.fuse(attend).build(q, k, v)
    assert compiled is not None and compiled.plan.backward is not None
    kinds = [r.kind for r in compiled.plan.backward.regions]
    assert kinds.count("matmul") == 4 and kinds.count("rows") == 1
