"""Concatenations taken apart, shared operand copies, and biases put back into their products."""

from __future__ import annotations

import pytest
import torch
from support import GraphBuilder, assert_close_to_float64, kinds, ops_of, plan_of
from torch import Tensor, nn

import megafuse
from megafuse import Options, passes
from megafuse.fusion.plan import MatmulRegion
from megafuse.ir import Graph
from megafuse.passes.dce import dce
from megafuse.passes.operands import copied_operands, layout_of
from megafuse.passes.pieces import MOST_PARTS, pieces
from megafuse.passes.whole import whole_products
from megafuse.runtime.reference import interpret
from megafuse.subgraphs import Case
from megafuse.tools.coverage import meta_plan

HALF = torch.bfloat16


def assert_same_results(before: Graph, after: Graph, *shapes: tuple[int, ...]) -> None:
    args = [torch.randn(s) for s in shapes]
    for want, got in zip(interpret(before)(*args), interpret(after)(*args), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def rotate(g: GraphBuilder):  # type: ignore[no-untyped-def]
    """x * c + cat(-x[4:], x[:4]) * s, the rotary embedding."""
    x, c, s = g.input(6, 8), g.input(8), g.input(1, 8)
    halves = g.op("neg", g.slice(x, 1, 4, 8)), g.slice(x, 1, 0, 4)
    turned = g.op("cat", *halves, shape=(6, 8), dim=1)
    return g.op("add", g.op("mul", x, c), g.op("mul", turned, s))


def test_arithmetic_on_a_concatenation_is_done_on_its_parts() -> None:
    g = GraphBuilder()
    before = g.graph(rotate(g))
    after = pieces(before)
    (out,) = after.outputs
    assert out is not None and out.op == "cat" and ops_of(after).count("cat") == 1
    assert [p.shape for p in out.inputs] == [(6, 4), (6, 4)]
    assert_same_results(before, after, (6, 8), (8,), (1, 8))


def test_views_and_nested_concatenations() -> None:
    g = GraphBuilder()
    a, b, c = g.input(2, 3, 4), g.input(2, 3, 4), g.input(2, 3, 8)
    packed = g.op("cat", g.op("cat", a, b, shape=(2, 3, 8), dim=2), c, shape=(2, 3, 16), dim=2)
    turned = g.reshape(g.permute(packed, 0, 2, 1), 2, 4, 12)
    inner = g.slice(packed, 2, 5, 7)
    before = g.graph(g.op("neg", turned), g.op("exp", inner))
    after = pieces(before)
    assert ops_of(after).count("cat") == 1
    assert_same_results(before, after, (2, 3, 4), (2, 3, 4), (2, 3, 8))


def test_a_stack_reshaped_over_its_parts() -> None:
    """[3 b, t] as [3, b, t] and on: what the gradient of packed q, k and v looks like."""
    g = GraphBuilder()
    parts = [g.input(2, 6) for _ in range(3)]
    flat = g.op("cat", *parts, shape=(6, 6), dim=0)
    packed = g.reshape(g.permute(g.reshape(flat, 3, 2, 6), 1, 0, 2), 2, 18)
    before = g.graph(g.op("neg", packed))
    after = pieces(before)
    (out,) = after.outputs
    assert out is not None and out.op == "cat" and out.attrs["dim"] == 1
    assert_same_results(before, after, (2, 6), (2, 6), (2, 6))


def test_concatenations_left_alone() -> None:
    """A reduction along the row needs the whole; many parts would be many copies of the code; an
    output is stored as it is."""
    g = GraphBuilder()
    a, b = g.input(5, 4), g.input(5, 4)
    both = g.op("cat", a, b, shape=(5, 8), dim=1)
    centred = g.op("sub", both, g.reduce("sum", both, 1))
    assert ops_of(pieces(g.graph(centred))) == ops_of(g.graph(centred))

    g = GraphBuilder()
    many = [g.input(5, 1) for _ in range(MOST_PARTS + 1)]
    wide = g.op("neg", g.op("cat", *many, shape=(5, MOST_PARTS + 1), dim=1))
    assert ops_of(pieces(g.graph(wide))) == ["cat", "neg"]

    g = GraphBuilder()
    both = g.op("cat", g.input(5, 4), g.input(5, 4), shape=(5, 8), dim=1)
    assert ops_of(pieces(g.graph(both, g.op("neg", both)))) == ["cat", "neg"]


def test_a_concatenation_that_products_read_keeps_its_layout() -> None:
    """Two strided views of one store, rather than two stores."""
    g = GraphBuilder()
    a, b, w = g.input(2, 3, 4), g.input(2, 3, 4), g.input(2, 8, 5)
    both = g.op("cat", a, b, shape=(2, 3, 8), dim=2)
    forward = g.op("matmul", both, w, shape=(2, 3, 5))
    gradient = g.op("matmul", g.permute(both, 0, 2, 1), g.input(2, 3, 5), shape=(2, 8, 5))
    after = pieces(g.graph(forward, gradient))
    assert ops_of(after) == ["cat", "matmul", "permute", "matmul"]


def test_rotary_is_one_region_a_tensor() -> None:
    from megafuse import zoo
    from megafuse.subgraphs import Settings

    case = zoo.subgraph("rotary", Settings(None, HALF)).case(0)
    assert kinds(plan_of(case.module, *case.args)) == (["rows"] * 2, ["rows"] * 2)


def heads(g: GraphBuilder):  # type: ignore[no-untyped-def]
    """q and k of two heads out of a packed [t, 2 * heads * d], and q @ k^T, k^T @ q."""
    packed = g.reshape(g.input(3, 5, 2 * 2 * 4), 3, 5, 2, 2, 4)
    moved = g.permute(packed, 2, 0, 3, 1, 4)
    q, k = (g.reshape(g.slice(moved, 0, i, i + 1), 3, 2, 5, 4) for i in range(2))
    flat_q, flat_k = g.reshape(q, 6, 5, 4), g.reshape(k, 6, 5, 4)
    turned = g.reshape(g.permute(k, 0, 1, 3, 2), 6, 4, 5)
    scores = g.op("matmul", flat_q, turned, shape=(6, 5, 5))
    mixed = g.op("matmul", scores, flat_k, shape=(6, 5, 4))
    return scores, mixed


def test_operands_that_hold_the_same_elements_share_a_copy() -> None:
    g = GraphBuilder()
    before = g.graph(*heads(g))
    after = copied_operands(before)
    assert ops_of(after).count("cast") == 2  # q, and k for both of its products
    assert_same_results(before, after, (3, 5, 16))


def test_strided_operands_are_not_copied() -> None:
    g = GraphBuilder()
    x = g.input(3, 5, 8)
    tokens = g.permute(g.slice(x, 2, 4, 8), 1, 0, 2)
    layout = layout_of(tokens)
    assert layout is not None and layout.strided and layout.start == 4
    assert layout.dims == (((5, 8),), ((3, 40),), ((4, 1),))
    graph = g.graph(g.op("matmul", tokens, g.input(5, 4, 2), shape=(5, 3, 2)))
    assert ops_of(copied_operands(graph)) == ops_of(graph)


def biased(g: GraphBuilder, dtype: torch.dtype, **attrs: bool):  # type: ignore[no-untyped-def]
    x, w, bias = (g.input(*s, dtype=dtype) for s in ((6, 4), (4, 5), (5,)))
    total = g.op("matmul", g.reshape(x, 1, 6, 4), g.reshape(w, 1, 4, 5), shape=(1, 6, 5))
    return g.op("add", g.reshape(total, 6, 5), bias, **attrs)


def test_only_what_was_one_call_becomes_one_again() -> None:
    for dtype, attrs, want in (
        (HALF, {"bias": True}, True), (HALF, {}, False), (torch.float32, {"bias": True}, True),
        (torch.float32, {}, False),
    ):  # fmt: skip
        g = GraphBuilder()
        after = passes.run(g.graph(biased(g, dtype, **attrs)))
        (product,) = (n for n in after.nodes if n.op == "matmul")
        assert product.attrs.get("epilogue") == (("row",) if want else None)
        assert ("add" in ops_of(after)) is not want


@pytest.mark.parametrize("shape", [(3, 1, 5), (3, 6, 5)])
def test_a_bias_by_batch(shape: tuple[int, ...]) -> None:
    g = GraphBuilder()
    a, b, bias = (g.input(*s, dtype=HALF) for s in ((3, 6, 4), (3, 4, 5), shape))
    total = g.op("add", bias, g.op("matmul", a, b, shape=(3, 6, 5)), bias=True)
    (product,) = (n for n in dce(whole_products(g.graph(total))).nodes if n.op == "matmul")
    assert product.attrs["epilogue"] == ("row" if shape[1] == 1 else "tensor",)


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + x


def test_linear_layers_on_a_hopper_gpu_are_products_with_epilogues() -> None:
    with torch.device("meta"):
        module, x = Linears().to(HALF), torch.randn(2, 7, 24, dtype=HALF, requires_grad=True)
    plan = meta_plan(Case(module, (x,)))
    assert kinds(plan)[0] == ["matmul", "rows", "matmul"]  # k is too short for a tail
    steps = [r.node.attrs.get("epilogue") for r in plan.forward.regions if r.kind == "matmul"]
    assert steps == [("row",), ("row", "tensor")]


def test_linear_layers_elsewhere_round_as_eager_does() -> None:
    torch.manual_seed(0)
    module, x = Linears().to(HALF), torch.randn(2, 7, 24, dtype=HALF, requires_grad=True)
    assert kinds(plan_of(module, x))[0] == ["matmul", "rows", "matmul", "rows"]
    assert_close_to_float64(module, [x])
    fused = megafuse.fuse(module, options=Options(rounding="eager"))
    torch.testing.assert_close(fused(x), module(x), rtol=0, atol=0)


def test_float32_linear_layers_are_the_calls_eager_makes() -> None:
    """The bias is added before the one rounding, on a Hopper GPU too; bytes count it with them."""
    torch.manual_seed(0)
    x, layer = torch.randn(6, 64, requires_grad=True), nn.Linear(64, 24)
    fused = megafuse.fuse(layer, x)
    assert torch.equal(fused(x), layer(x))
    (product,) = (r for r in fused.summary(x).regions if r.direction == "forward")
    assert product.kind == "matmul" and product.flops == 2 * 6 * 64 * 24
    assert product.bytes_read == 4 * (6 * 64 + 64 * 24 + 24)
    with torch.device("meta"):
        there = meta_plan(Case(nn.Linear(64, 24), (torch.randn(6, 64, requires_grad=True),)))
    (region,) = there.forward.regions
    assert isinstance(region, MatmulRegion) and [kind for kind, _ in region.extras] == ["row"]


def test_an_explicit_addition_stays_in_the_walk_that_follows() -> None:
    """The block's products: bmm, then an addition of its own, which eager rounds apart."""
    x, w, bias = torch.randn(2, 6, 8), torch.randn(2, 8, 4), torch.randn(2, 1, 4)
    assert kinds(plan_of(lambda x, w, b: torch.bmm(x, w) + b, x, w, bias))[0] == ["matmul", "rows"]


def test_parts_written_by_several_regions_come_before_their_reader() -> None:
    """A later region that reads a concatenation waits for all who write parts of it."""
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm1(x)
            rows = [f(z).sigmoid() for f, z in zip(self.each, h.unbind(1), strict=True)]
            return self.norm2(h + torch.stack(rows, 1))

    assert_close_to_float64(Tokens().to(HALF), [torch.randn(5, 3, 16).to(HALF).requires_grad_()])
