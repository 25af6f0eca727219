"""The graph as a data structure: printing, sizes, and what an illegal graph is."""

from __future__ import annotations

import pytest
import torch
from support import GraphBuilder, ops_of

from megafuse.errors import InvariantError
from megafuse.invariants import broadcast, check_graph
from megafuse.ir import Node, TensorType, as_dim, evaluate, product, symbol, walk
from megafuse.runtime.reference import interpret, source

B = symbol("s0")


def test_dims() -> None:
    assert as_dim(B - B + 3) == 3 and isinstance(as_dim(B - B + 3), int)
    assert product((B, 2, 3)) == 6 * B
    assert evaluate(6 * B + 1, {"s0": 5}) == 31
    assert TensorType((B, 4), torch.bfloat16).nbytes == 8 * B
    assert str(TensorType((B, 4), torch.bfloat16)) == "bf16[s0, 4]"


def test_sizes_are_read_from_inputs() -> None:
    g = GraphBuilder()
    g.input(3, 4)
    x = g.input(7, B)
    assert g.graph(x).sizes == {"s0": (1, 1)}


def test_printed_graph_runs() -> None:
    g = GraphBuilder()
    x, w = g.input(B, 4), g.input(4)
    y = g.op("mul", x, w)
    total = g.reduce("sum", y, 1)
    scaled = g.op("div", total, 2.0)
    wide = g.op("expand", scaled, shape=(B, 4))
    half = g.slice(wide, 1, 1, 4, 2)
    both = g.op("cat", half, half, shape=(B, 4), dim=1)
    mixed = g.permute(g.reshape(both, B, 2, 2), 0, 2, 1)
    graph = g.graph(mixed, None, g.op("amax", x, shape=(B, 1), dims=(1,)))
    check_graph(graph)
    a, b = torch.randn(3, 4), torch.randn(4)
    got = interpret(graph)(a, b)
    s = ((a * b).sum(1, keepdim=True) / 2).expand(3, 4)[:, 1:4:2]
    torch.testing.assert_close(got[0], torch.cat([s, s], 1).reshape(3, 2, 2).permute(0, 2, 1))
    assert got[1] is None
    assert torch.equal(got[2], a.amax(1, True))
    text = source(graph)
    assert "s0 = x0.shape[0]" in text and "torch.sum(mul_2, [1], True" in text
    assert str(graph).startswith(f"# after capture: {len(graph.nodes)} nodes\ndef graph(x0, x1):")


def test_live_and_users() -> None:
    g = GraphBuilder()
    x = g.input(4)
    a = g.op("neg", x)
    dead = g.op("exp", a)
    out = g.op("add", a, a)
    graph = g.graph(out)
    assert graph.live() == {x, a, out}
    assert graph.users()[a] == [dead, out]
    assert set(walk([dead])) == {dead, a, x}
    assert ops_of(graph) == ["neg", "exp", "add"]


def test_broadcast() -> None:
    assert broadcast([(B, 1, 4), (3, 1)]) == (B, 3, 4)
    assert broadcast([(2, 3), (2, 4)]) is None
    assert broadcast([(B,), (3,)]) is None
    assert broadcast([(2 * B,), (B + B,)]) == (2 * B,)


def _node(op: str, args: tuple[Node, ...], *shape: int, **attrs: object) -> Node:
    return Node("bad", op, args, TensorType(shape, torch.float32), dict(attrs))


@pytest.mark.parametrize(
    "op, shape, attrs, message",
    [
        ("reshape", (5,), {}, "another element count"),
        ("permute", (2, 3), {"order": (1, 0)}, "should have shape"),
        ("expand", (2, 4), {}, "does not expand"),
        ("slice", (2,), {"dim": 0, "start": 0, "stop": 2, "step": 1}, "changes rank"),
        ("sum", (2, 3), {"dims": (1,)}, "should have shape"),
        ("neg", (3, 2), {}, "should have shape"),
        ("matmul", (2, 2), {}, None),
        ("frobnicate", (2, 3), {}, "unknown operator"),
    ],
)
def test_ill_typed_nodes_are_caught(
    op: str, shape: tuple[int, ...], attrs: dict[str, object], message: str | None
) -> None:
    g = GraphBuilder()
    x = g.input(2, 3)
    args = (x, x) if op == "matmul" else (x,)
    node = _node(op, args, *shape, **attrs)
    g.nodes.append(node)
    with pytest.raises((InvariantError, ValueError), match=message):
        check_graph(g.graph(node))


def test_matmul_extents_must_agree() -> None:
    g = GraphBuilder()
    a, b = g.input(2, 3, 4), g.input(2, 5, 6)
    node = _node("matmul", (a, b), 2, 3, 6)
    g.nodes.append(node)
    with pytest.raises(InvariantError, match="do not fit"):
        check_graph(g.graph(node))


def test_cat_must_add_up() -> None:
    g = GraphBuilder()
    a = g.input(2, 3)
    node = _node("cat", (a, a), 2, 5, dim=1)
    g.nodes.append(node)
    with pytest.raises(InvariantError, match="should have shape"):
        check_graph(g.graph(node))


def test_order_names_and_closure() -> None:
    g = GraphBuilder()
    x = g.input(2)
    a = g.op("neg", x)
    b = g.op("exp", a)
    check_graph(g.graph(b))
    g.nodes[1:] = [b, a]
    with pytest.raises(InvariantError, match=f"uses {a} before its definition"):
        check_graph(g.graph(b))
    g.nodes[1:] = [a, b]
    b.name = a.name
    with pytest.raises(InvariantError, match="its name is taken"):
        check_graph(g.graph(b))
    b.name = "fine"
    stray = _node("neg", (x,), 2)
    with pytest.raises(InvariantError, match="not among the nodes"):
        check_graph(g.graph(stray))
