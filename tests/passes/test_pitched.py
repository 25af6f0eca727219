"""Rows at multiples of 16 bytes where products want them: which, and that no result changes."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import GraphBuilder, block_case, step
from torch import Tensor, nn

import megafuse
from megafuse.fusion.plan import MatmulRegion
from megafuse.ir import Dim, Graph, Node
from megafuse.passes.operands import layout_of
from megafuse.passes.pitched import _addressable, pitched
from megafuse.runtime.product import accepts, product_of
from megafuse.runtime.reference import interpret

rules = importlib.import_module("megafuse.passes.pitched")


class Halves(GraphBuilder):
    def input(self, *shape: Dim, dtype: torch.dtype = torch.bfloat16) -> Node:
        return super().input(*shape, dtype=dtype)


def matmul(g: GraphBuilder, a: Node, b: Node) -> Node:
    return g.op("matmul", a, b, shape=(*a.shape[:2], b.shape[2]))


def pitches(graph: Graph) -> list[tuple[str, int]]:
    return [(n.op, n.attrs["pitch"]) for n in graph.nodes if "pitch" in n.attrs]


def refused(graph: Graph) -> list[Node]:
    """Operands of products that the copy engine cannot address."""
    operands = [x for n in graph.nodes if n.op == "matmul" for x in n.inputs]
    return [x for x in operands if not _addressable(layout_of(x))]  # type: ignore[arg-type]


def test_what_is_computed_needs_no_copy() -> None:
    g = Halves()
    x, w = g.op("exp", g.input(2, 64, 77)), g.input(2, 77, 128)
    after = pitched(g.graph(g.op("neg", matmul(g, x, w))), {})
    assert pitches(after) == [("exp", 80)] and not refused(after)


def test_neither_does_a_result_that_stays_inside() -> None:
    g = Halves()
    product = matmul(g, g.input(1, 256, 64), g.permute(g.input(1, 101, 64), 0, 2, 1))
    after = pitched(g.graph(g.op("neg", product)), {})
    assert pitches(after) == [("matmul", 104)]


def linear(g: GraphBuilder, rows: int, extent: int = 1001) -> Graph:
    """A layer of inputs on inputs, whose result is seen."""
    return g.graph(matmul(g, g.input(1, rows, 1024), g.input(1, 1024, extent)))


def test_inputs_and_outputs_are_copied_where_that_pays() -> None:
    g = Halves()
    after = pitched(linear(g, 32_768), {})
    assert pitches(after) == [("cast", 1008), ("matmul", 1008)] and not refused(after)
    assert [n.op for n in after.nodes] == ["input", "input", "cast", "matmul", "cast"]
    assert after.outputs[0].op == "cast" and after.outputs[0].room == (1, 32_768, 1001)  # type: ignore[union-attr]
    g = Halves()
    assert not pitches(pitched(linear(g, 128), {}))
    g = Halves()
    assert not pitches(pitched(linear(g, 32_768, 1000), {}))


def test_a_copy_is_shared_and_turned() -> None:
    """A weight that is read by rows in one product and by columns in the other."""
    g = Halves()
    w, x = g.input(1, 4096, 1001), g.op("exp", g.input(1, 8192, 1001))
    y = matmul(g, x, g.permute(w, 0, 2, 1))
    after = pitched(g.graph(g.op("neg", matmul(g, y, w))), {})
    assert pitches(after) == [("exp", 1008), ("cast", 1008), ("matmul", 1008)]
    assert not refused(after)


@pytest.mark.parametrize("case", ["extern", "reshaped", "small", "float32", "output", "scattered"])
def test_left_alone(case: str) -> None:
    g = Halves()
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    rows = 32 if case == "small" else 128
    x = g.op("exp", g.input(2, rows, 77, dtype=dtype))
    a, w = x, g.input(2, 77, 64, dtype=dtype)
    if case == "reshaped":  # [2, 128, 77] as one row of 9856
        a, w = g.reshape(x, 2, 1, 128 * 77), g.input(2, 128 * 77, 4096)
    if case == "scattered":  # [256, 77, 2] with the batch innermost
        a = g.permute(g.op("exp", g.input(128, 77, 2)), 2, 0, 1)
    outputs = [g.op("neg", matmul(g, a, w))]
    if case == "extern":
        outputs.append(g.op("extern", x, shape=(1,), target="aten.mystery.default"))
    if case == "output":
        outputs.append(x)
    assert not pitches(pitched(g.graph(*outputs), {}))


def test_the_same_elements() -> None:
    g = Halves()
    before = linear(g, 96, 75)
    after = pitched(before, {})
    args = [torch.randn(1, 96, 1024).bfloat16(), torch.randn(1, 1024, 75).bfloat16()]
    assert torch.equal(interpret(before)(*args)[0], interpret(after)(*args)[0])


# ---- whole modules, in memory that has pitches ---------------------------------------------------


class Linears(nn.Module):
    """Odd widths inside and outside, a concatenation, and a gradient of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(77)
        self.first, self.second = nn.Linear(77, 83), nn.Linear(83 + 30, 77)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(self.norm(x)))
        return x + self.second(torch.cat([h, x[..., :30]], dim=-1))


def _linears() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Linears().bfloat16(), (torch.randn(80, 77).bfloat16().requires_grad_(),)


def _block(shape: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    case = block_case(shape, torch.bfloat16)
    return case.module, tuple(case.args)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "linears": _linears,
    "block": lambda: _block((66, 5, 65, 2)),
    "block of two": lambda: _block((2, 3, 75, 3)),
}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as on Hopper, and every copy worth its time."""
    monkeypatch.setattr("megafuse.runtime.plans.has_epilogues", lambda *_: True)
    monkeypatch.setattr(rules, "SLOWER", 1e9)
    monkeypatch.setattr(rules, "LEAST_EXTENT", 1)
    monkeypatch.setattr(rules, "LEAST_RESULT", 1)


@pytest.mark.parametrize("steps", [False, True], ids=["program", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_modules(name: str, steps: bool, everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if steps:
        monkeypatch.setattr("megafuse.runtime.arena.MIDDLE_BYTES", -1)
    module, args = CASES[name]()
    parameters = list(module.parameters())
    fused = megafuse.fuse(module)
    compiled = fused.build(*args)
    assert compiled is not None and compiled.forward and compiled.backward
    products = [
        (e.plan.sizes, r) for e in (compiled.forward, compiled.backward) for r in e.plan.regions
        if isinstance(r, MatmulRegion)
    ]  # fmt: skip
    assert any(r.node.room != r.node.shape for _, r in products)
    reasons = {r.name: accepts(product_of(r, sizes)) for sizes, r in products}
    assert not any(reasons.values()), reasons
    gots = step(fused, parameters, args)
    monkeypatch.setattr("megafuse.passes.pitched", lambda graph, sizes: graph)
    wants = step(megafuse.fuse(module), parameters, args)
    for want, got in zip(wants, gots, strict=True):
        assert want is not None and got is not None
        assert got.is_contiguous() and got.shape == want.shape
        # PyTorch may sum in another order where strides are others.
        assert (got.double() - want.double()).norm() <= 2.0**-8 * want.double().norm()


def test_hooks_on_saved_tensors_bring_them_back_without_the_pitch(everywhere: None) -> None:
    module, args = _linears()
    fused = megafuse.fuse(module)
    parameters = list(module.parameters())
    plain = step(fused, parameters, args)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().contiguous(), lambda t: t):
        hooked = step(fused, parameters, args)
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))  # type: ignore[arg-type]
