"""Products done apart for each token, as one."""

from __future__ import annotations

import torch
from support import GraphBuilder, assert_close_to_float64, kinds, ops_of, plan_of
from torch import Tensor, nn

from megafuse.ir import Dim, Graph, Node, symbol
from megafuse.passes.batch import batch
from megafuse.passes.dce import dce
from megafuse.passes.simplify import simplify
from megafuse.runtime.reference import interpret

HALF = torch.bfloat16


class Halves(GraphBuilder):
    """Of 16-bit tensors: only their products are batched."""

    def input(self, *shape: Dim, dtype: torch.dtype = HALF) -> Node:
        return super().input(*shape, dtype=dtype)


def batched(graph: Graph) -> Graph:
    return simplify(dce(batch(graph)))


def assert_same_results(before: Graph, after: Graph) -> None:
    args = [torch.randn([int(d) for d in n.shape], dtype=n.dtype) for n in before.inputs]
    for want, got in zip(interpret(before)(*args), interpret(after)(*args), strict=True):
        torch.testing.assert_close(got, want)


def products(g: GraphBuilder, x: Node, order: list[int], k: int, n: int) -> list[Node]:
    """relu(x[:, i] @ w_i + b_i) for each i of `order`, sorted by i."""
    found = {}
    for i in order:
        w, b = g.input(k, n), g.input(n)
        a = g.reshape(g.slice(x, 1, i, i + 1), 1, x.shape[0], k)
        m = g.op("matmul", a, g.reshape(w, 1, k, n), shape=(1, x.shape[0], n))
        found[i] = g.op("relu", g.op("add", g.reshape(m, x.shape[0], n), b))
    return [found[i] for i in sorted(found)]


def stacked(g: GraphBuilder, rows: list[Node]) -> Node:
    m, n = rows[0].shape
    parts = [g.reshape(r, m, 1, n) for r in rows]
    return g.op("cat", *parts, shape=(m, len(rows), n), dim=1)


def test_linears_for_each_token() -> None:
    for order in ([0, 1, 2], [2, 1, 0]):
        g = Halves()
        before = g.graph(stacked(g, products(g, g.input(5, 3, 4), order, 4, 6)))
        after = batched(before)
        assert ops_of(after).count("matmul") == 1 and "cat" not in ops_of(after)
        assert ops_of(after).count("extern") == 2  # weights and biases, stacked
        assert_same_results(before, after)


def test_two_layers_and_a_tensor_used_elsewhere() -> None:
    g = Halves()
    x = g.input(5, 3, 4)
    hidden = products(g, x, [0, 1, 2], 4, 6)
    out = []
    for h in hidden:
        m = g.op(
            "matmul", g.reshape(h, 1, 5, 6), g.reshape(g.input(6, 2), 1, 6, 2), shape=(1, 5, 2)
        )
        out.append(g.reshape(m, 5, 2))
    before = g.graph(stacked(g, out), hidden[1])
    after = batched(before)
    assert ops_of(after).count("matmul") == 2 and "cat" not in ops_of(after)
    assert_same_results(before, after)


def test_sums_over_rows_of_slices() -> None:
    """Gradients of biases: one sum, whose slices are the outputs."""
    g = GraphBuilder()
    x = g.input(5, 3, 4)
    sums = [g.reduce("sum", g.op("neg", g.reshape(g.slice(x, 1, i, i + 1), 5, 4)), 0)
            for i in range(3)]  # fmt: skip
    before = g.graph(*sums)
    after = batched(before)
    assert ops_of(after).count("sum") == 1
    assert_same_results(before, after)


def test_left_apart() -> None:
    """Two products; heads on one input; slices with a gap; other shapes; computed weights."""
    g = Halves()
    x = g.input(5, 3, 4)
    cases = [products(g, x, [0, 1], 4, 6), products(g, g.input(5, 5, 4), [0, 1, 3], 4, 6)]
    shared = [
        g.op("matmul", g.reshape(g.input(5, 4), 1, 5, 4), g.reshape(w, 1, 4, 6), shape=(1, 5, 6))
        for w in (g.input(4, 6), g.input(4, 6), g.input(4, 6))
    ]
    one = g.reshape(g.slice(x, 1, 0, 1), 1, 5, 4)
    heads = [g.op("matmul", one, g.reshape(g.input(4, 6), 1, 4, 6), shape=(1, 5, 6))
             for _ in range(3)]  # fmt: skip
    for outputs in (*cases, shared, heads):
        before = g.graph(*outputs)
        count = ops_of(dce(before)).count("matmul")
        assert ops_of(batched(before)).count("matmul") == count == len(outputs)


def test_float32_products_stay_as_eager_has_them() -> None:
    """PyTorch's kernel for a batch of them has a larger error than the one for a single one."""
    g = GraphBuilder()
    before = g.graph(stacked(g, products(g, g.input(5, 3, 4), [0, 1, 2], 4, 6)))
    assert ops_of(batched(before)).count("matmul") == 3
    assert_same_results(before, batched(before))


def test_pieces_of_one_tensor_put_together_again() -> None:
    g = GraphBuilder()
    x = g.input(5, 8)
    parts = [g.op("exp", g.slice(x, 1, s, s + 4)) for s in (0, 4)]
    before = g.graph(g.op("cat", *parts, shape=(5, 8), dim=1))
    assert ops_of(batched(before)).count("exp") == 1 and "cat" not in ops_of(batched(before))
    assert_same_results(before, batched(before))
    g = GraphBuilder()
    x, rows = g.input(symbol("s0"), 8), [g.input(symbol("s0"), 4) for _ in range(2)]
    parts = [g.op("mul", g.slice(x, 1, 4 * i, 4 * i + 4), rows[i]) for i in range(2)]
    scaled = g.graph(g.op("cat", *parts, shape=(symbol("s0"), 8), dim=1))
    assert "cat" in ops_of(batched(scaled)), "another batch is not copied to save a copy"
    swapped = g.graph(g.op("cat", *parts[::-1], shape=(symbol("s0"), 8), dim=1))
    assert "cat" in ops_of(batched(swapped))


class Tokens(nn.Module):
    """An MLP for each token as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 24) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(24, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.up, self.down, x.unbind(1), strict=True)
        return torch.stack([down(up(z).sigmoid()) for up, down, z in pairs], dim=1)


def test_modules_in_a_list_train_as_one_batch() -> None:
    torch.manual_seed(0)
    module, x = Tokens(), torch.randn(6, 4, 16, requires_grad=True)
    half, y = Tokens().to(HALF), x.detach().to(HALF).requires_grad_()
    forward, backward = kinds(plan_of(half, y))
    assert forward.count("matmul") == 2 and backward.count("matmul") == 4
    assert len(forward) + len(backward) <= 14
    forward, backward = kinds(plan_of(module, x))
    assert forward.count("matmul") == 8 and backward.count("matmul") == 16
    assert_close_to_float64(module, [x])
    assert_close_to_float64(half, [y])
