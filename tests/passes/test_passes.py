"""Each rewrite before and after, on graphs built by hand; all of them keep the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import GraphBuilder, ops_of
from torch import Tensor

import megafuse
from megafuse import passes
from megafuse.invariants import check_graph
from megafuse.ir import Graph, Node, symbol
from megafuse.passes.cse import cse
from megafuse.passes.dce import dce
from megafuse.passes.in_memory import divides
from megafuse.passes.simplify import simplify
from megafuse.runtime.reference import interpret

B = symbol("s0")


def same_values(before: Graph, after: Graph) -> None:
    check_graph(after)
    sizes = {B: 3}
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn([d if isinstance(d, int) else int(d.subs(sizes)) for d in n.shape],
                    generator=generator).to(n.dtype)
        for n in before.inputs
    ]  # fmt: skip
    for a, b in zip(interpret(before)(*inputs), interpret(after)(*inputs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        near = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a, b, rtol=near, atol=1e-5)


def _reshapes(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.reshape(g.reshape(x, B * 4, 6), B, 24))


def _reshape_away(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.reshape(g.reshape(x, B * 4, 6), B, 4, 6))


def _permutes(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.permute(g.permute(x, 1, 0, 2), 2, 1, 0))


def _permute_away(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.permute(g.permute(x, 1, 2, 0), 2, 0, 1))


def _expand_away(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.op("expand", x, shape=x.shape))


def _cast_away(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.op("cast", x))


def _sum_of_cat(g: GraphBuilder, x: Node) -> Node:
    wide = g.op("cat", x, g.op("neg", x), shape=(B, 4, 12), dim=2)
    return g.reduce("sum", wide, 0, 1)


def _sum_of_both(g: GraphBuilder, x: Node) -> Node:
    return g.reduce("sum", x, 0, 2)


def _sum_over_one(g: GraphBuilder, x: Node) -> Node:
    return g.op("neg", g.reduce("sum", g.reshape(x, B, 4, 6, 1), 3))


def _cast_of_sum(g: GraphBuilder, x: Node) -> Node:
    total = g.reduce("sum", x, 0, 1)
    return g.op("cast", g.reshape(total, 6), dtype=torch.bfloat16)


def _times_one(g: GraphBuilder, x: Node) -> Node:
    return g.op("div", g.op("mul", g.op("neg", x), 1.0), 1)


def _input_times_one(g: GraphBuilder, x: Node) -> Node:
    return g.op("mul", x, 1.0)


@pytest.mark.parametrize(
    "build, expected",
    [
        (_times_one, ["neg"]),
        (_input_times_one, ["mul"]),
        (_reshapes, ["reshape", "neg"]),
        (_reshape_away, ["neg"]),
        (_permutes, ["permute", "neg"]),
        (_permute_away, ["neg"]),
        (_expand_away, ["neg"]),
        (_cast_away, ["neg"]),
        (_sum_of_cat, ["neg", "sum", "sum", "cat"]),
        (_sum_of_both, ["sum", "sum"]),
        (_sum_over_one, ["reshape", "neg"]),
        (_cast_of_sum, ["sum", "reshape"]),
    ],
)
def test_simplify(build: Callable[[GraphBuilder, Node], Node], expected: list[str]) -> None:
    g = GraphBuilder()
    before = g.graph(build(g, g.input(B, 4, 6)))
    check_graph(before)
    after = dce(simplify(before))
    assert ops_of(after) == expected
    same_values(before, after)


def test_composed_permutation_order() -> None:
    g = GraphBuilder()
    graph = dce(simplify(g.graph(_permutes(g, g.input(B, 4, 6)))))
    assert next(n for n in graph.nodes if n.op == "permute").attrs["order"] == (2, 0, 1)


def test_a_sum_used_twice_keeps_its_float32() -> None:
    g = GraphBuilder()
    x = g.input(B, 6)
    total = g.reduce("sum", x, 1)
    before = g.graph(g.op("cast", total, dtype=torch.bfloat16), g.op("mul", total, 3.0))
    after = dce(simplify(before))
    (kept,) = [n for n in after.nodes if n.op == "sum"]
    assert kept.dtype == torch.float32 and ops_of(after) == ["sum", "cast", "mul"]
    same_values(before, after)


def test_inner_part_of_a_split_sum_is_over_the_row() -> None:
    g = GraphBuilder()
    after = simplify(g.graph(_sum_of_both(g, g.input(B, 4, 6, dtype=torch.float32))))
    inner, outer = (n for n in after.nodes if n.op == "sum")
    assert inner.attrs["dims"] == (2,) and outer.attrs["dims"] == (0,)
    assert inner.dtype == torch.float32


def test_a_sum_over_cat_along_the_summed_dimension_stays() -> None:
    g = GraphBuilder()
    x = g.input(B, 6)
    wide = g.op("cat", x, x, shape=(B, 12), dim=1)
    assert ops_of(simplify(g.graph(g.reduce("sum", wide, 1)))) == ["cat", "sum"]


def test_cse_merges_equal_nodes_only() -> None:
    g = GraphBuilder()
    x, y = g.input(B, 4), g.input(B, 4)
    a, b = g.op("add", x, y), g.op("add", x, y)
    other, scaled, half = g.op("add", y, x), g.op("add", x, 1), g.op("add", x, 1.0)
    low, one = g.reduce("sum", a, 1), g.reduce("sum", b, 1)
    narrow = g.reduce("sum", b, 1, dtype=torch.bfloat16)
    call = {"target": "aten.rand_like.default", "args": [], "kwargs": {}, "multiple": False}
    r1, r2 = g.op("extern", x, **call), g.op("extern", x, **call)
    graph = cse(g.graph(low, one, other, scaled, half, narrow, r1, r2))
    check_graph(graph)
    assert ops_of(graph) == ["add", "add", "add", "add", "sum", "sum", "extern", "extern"]
    assert graph.outputs[0] is graph.outputs[1]
    assert graph.outputs[3] is not graph.outputs[4]  # 1 and 1.0 differ: the result type may


def test_dce_keeps_inputs_and_drops_the_rest() -> None:
    g = GraphBuilder()
    x, y = g.input(4), g.input(4)
    out = g.op("neg", x)
    g.op("exp", out)
    graph = dce(g.graph(out, None))
    assert graph.nodes == [x, y, out] and graph.outputs == [out, None]


def test_pipeline_checks_and_shows_every_stage() -> None:
    g = GraphBuilder()
    seen: list[str] = []
    before = g.graph(_sum_of_cat(g, g.input(B, 4, 6)))
    after = passes.run(before, lambda graph: seen.append(graph.made_by))
    assert seen == [
        "capture", "dce", "simplify", "cse", "batch", "dce", "simplify", "pieces", "simplify",
        "cse", "dce", "in_memory", "turned", "dce", "whole", "simplify", "operands",
        "dce",
    ]  # fmt: skip
    same_values(before, after)


def test_pipeline_is_idempotent() -> None:
    g = GraphBuilder()
    x = g.input(B, 4, 6)
    once = passes.run(g.graph(_sum_of_cat(g, x), _permutes(g, x), _cast_of_sum(g, x)))
    twice = passes.run(once)
    assert ops_of(once) == ops_of(twice)


def test_a_window_is_copied_where_no_loop_addresses_its_reshape() -> None:
    def code(x: Tensor) -> Tensor:
        return torch.tanh((x * 2)[:, :, 0:1].reshape(3, 2, 2, 7))

    x = torch.randn(3, 7, 4, 4, requires_grad=True)
    got, want = megafuse.fuse(code)(x), code(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))


def test_a_reshape_that_no_loop_addresses_is_a_view_of_memory() -> None:
    s = symbol("s0")
    for a, b, fits in (
        ((4, 6), (6, 4), False), ((4, 6), (24,), True), ((4, 6), (2, 12), True),
        ((s, 4, 6), (s, 24), True), ((s, 6), (6 * s,), True), ((s, 6), (2, 3, s), False),
        ((s, 6, 1), (2 * s, 3), True), ((s, 4, 6), (s, 8, 3), True), ((3, 4, 5), (6, 10), True),
    ):  # fmt: skip
        assert divides(a, b) == divides(b, a) == fits, (a, b)

    def code(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh((x * 2).reshape(6, 4) * w).reshape(3, 8)

    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    fused = megafuse.fuse(code)
    got, want = (torch.autograd.grad(f(x, w).square().sum(), [x, w]) for f in (fused, code))
    torch.testing.assert_close(fused(x, w), code(x, w))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)
