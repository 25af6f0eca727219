"""Every pointwise operator has every field, and computes what PyTorch computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
from support import REPOSITORY, GraphBuilder, kinds, plan_of
from torch import Tensor

import megafuse
from megafuse import ops
from megafuse.ops import pointwise
from megafuse.ops.pointwise import BY_ATEN, TABLE, Pointwise
from megafuse.runtime.reference import interpret

TILE = [p.read_text() for p in (REPOSITORY / "src/megafuse/codegen/tile").glob("*.*h")]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3.0, 1e-4, 30.0, -30.0]
UNARY = [op for op in TABLE.values() if op.arity == 1 and op.name != "cast"]
BINARY = [op for op in TABLE.values() if op.arity == 2]


@pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
def test_entry_is_complete(op: Pointwise) -> None:
    assert TABLE[op.name] is op
    assert all(BY_ATEN[name] is op for name in op.aten)
    assert faults(op) == []


def faults(op: Pointwise) -> list[str]:
    """What the entry lacks of a name, a meaning, a cost, a spelling and samples."""
    found = [] if op.aten else ["no aten name"]
    found += [f"torch has no aten::{name}" for name in op.aten if not hasattr(torch.ops.aten, name)]
    for what, text in (("meaning", op.torch), ("spelling", op.cpp)):
        holes = {int(n) for n in re.findall(r"\{(\d)\}", text)}
        if holes != set(range(op.arity)):
            found.append(f"no {what} of {op.arity} arguments: {text!r}")
    for word in re.findall(r"mf::(\w+)", op.cpp):
        if not any(re.search(rf"\b{word}\b", text) for text in TILE):
            found.append(f"no header defines mf::{word}")
    if op.flops < (0 if op.name == "cast" else 1):
        found.append("no cost")
    if len(op.samples) < 2 or any(len(s) != op.arity for s in op.samples):
        found.append("fewer than two samples")
    if op.name != "cast" and not found:
        for sample in op.samples:
            args = [torch.tensor(v, dtype=torch.float32) for v in sample]
            if not bool(torch.isfinite(meaning(op)(*args).float())):
                found.append(f"undefined at its sample {sample}")
    return found


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("aten", (), "no aten name"), ("aten", ("no_such_op",), "torch has no aten::no_such_op"),
        ("torch", "torch.exp()", "no meaning"), ("cpp", "mf::exp({0}, {1})", "no spelling"),
        ("cpp", "mf::no_such_word({0})", "no header defines mf::no_such_word"),
        ("flops", 0, "no cost"), ("samples", ((1.0,),), "fewer than two samples"),
        ("samples", ((1.0,), (1.0, 2.0)), "fewer than two samples"),
        ("samples", ((1.0,), (1e9,)), "undefined at its sample"),
    ],
)  # fmt: skip
def test_an_incomplete_entry_is_found(field: str, value: object, said: str) -> None:
    entry = dataclasses.replace(TABLE["exp"], **{field: value})  # type: ignore[arg-type]
    assert any(said in fault for fault in faults(entry)), faults(entry)


def test_every_other_operator_has_a_meaning() -> None:
    """Views, reductions and the rest: their spelling, run, is what torch computes."""
    g = GraphBuilder()
    x, y = g.input(2, 3, 4), g.input(2, 4, 3)
    v = torch.arange(24.0).reshape(2, 3, 4).sin()
    w = torch.arange(24.0).reshape(2, 4, 3).cos()
    cases = {
        "reshape": (g.reshape(x, 6, 4), v.reshape(6, 4)),
        "permute": (g.permute(x, 2, 0, 1), v.permute(2, 0, 1)),
        "expand": (g.op("expand", g.slice(x, 1, 0, 1), shape=(2, 3, 4)), v[:, :1].expand(2, 3, 4)),
        "slice": (g.slice(x, 2, 1, 4, 2), v[:, :, 1:4:2]),
        "sum": (g.reduce("sum", x, 0, 2), v.sum((0, 2), True)),
        "amax": (g.reduce("amax", x, 2), v.amax(2, True)),
        "amin": (g.reduce("amin", x, 2), v.amin(2, True)),
        "cat": (g.op("cat", x, x, shape=(2, 6, 4), dim=1), torch.cat([v, v], 1)),
        "full": (g.op("full", shape=(2, 2), value=1.5), torch.full((2, 2), 1.5)),
        "matmul": (g.op("matmul", x, y, shape=(2, 3, 3)), v @ w),
    }
    assert set(cases) >= ops.VIEWS | ops.REDUCTIONS
    got = interpret(g.graph(*(node for node, _ in cases.values())))(v, w)
    for name, value, (_, want) in zip(cases, got, cases.values(), strict=True):
        assert torch.equal(value, want), name


def test_expensive_operators_cost_more() -> None:
    assert all(op.flops >= 8 for op in TABLE.values() if op.expensive)
    assert TABLE["exp"].expensive and not TABLE["add"].expensive


def meaning(op: Pointwise) -> Callable[..., Tensor]:
    names = ("a", "b", "c")[: op.arity]
    text = op.torch.format(*names)
    if op.name == "where":
        text = text.replace("(a,", "(a > 0.5,")
    return eval(f"lambda {', '.join(names)}: {text}", {"torch": torch})  # type: ignore[no-any-return]


def all_unary(x: Tensor) -> dict[str, Tensor]:
    return {op.name: meaning(op)(x) for op in UNARY}


def all_others(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {op.name: meaning(op)(a, b) for op in BINARY} | {
        "where": torch.where(a > 0.5, b, a), "where scalar": torch.where(a > 0.5, 2.0, b),
        "to float16": a.to(torch.float16), "to bfloat16": a.to(torch.bfloat16),
        "to bool": a.to(torch.bool), "squared": a**2.0, "cubed": a**3, "root": b**0.5,
        "scaled": torch.add(a, b, alpha=3), "less": torch.sub(a, b, alpha=0.25),
    }  # fmt: skip


def operands(dtype: torch.dtype, ops: list[Pointwise], arity: int) -> list[Tensor]:
    points = list(itertools.product(SPECIAL, repeat=arity))
    points += [s for op in ops for s in op.samples]
    points += [(0.25,) * arity] * (-len(points) % 3)  # makes three rows
    columns = zip(*points, strict=True)
    return [torch.tensor(column, dtype=dtype).reshape(3, -1) for column in columns]


def assert_same(name: str, got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, name
    if not want.is_floating_point():
        assert torch.equal(got, want), name
        return
    # Half a unit of the type, and float32's exponentials to about two units.
    step = {torch.float32: 4e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[want.dtype]
    torch.testing.assert_close(
        got, want, rtol=step, atol=1e-37, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_unary_operators_in_one_kernel(dtype: torch.dtype) -> None:
    (x,) = operands(dtype, UNARY, 1)
    plan = plan_of(all_unary, x)
    assert kinds(plan) == (["rows"], [])
    assert {n.op for n in plan.joint.nodes} >= {op.name for op in UNARY}
    got, want = megafuse.fuse(all_unary)(x), all_unary(x)
    for name, value in want.items():
        assert_same(name, got[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_other_operators_in_one_kernel(dtype: torch.dtype) -> None:
    a, b = operands(dtype, BINARY, 2)
    plan = plan_of(all_others, a, b)
    assert kinds(plan) == (["rows"], [])
    assert {n.op for n in plan.joint.nodes} >= {op.name for op in BINARY} | {"where", "cast"}
    got, want = megafuse.fuse(all_others)(a, b), all_others(a, b)
    for name, value in want.items():
        assert_same(name, got[name], value)


def test_nan_and_infinity_pass_through_max_min_and_relu() -> None:
    """Row reductions and pointwise forms alike."""

    def extremes(x: Tensor) -> tuple[Tensor, ...]:
        return x.amax(1), x.amin(1), torch.relu(x), torch.maximum(x, -x), x.clamp(-2.0, 2.0)

    x = torch.randn(5, 37)
    x[1, 36], x[2, 0], x[3, 18], x[4] = math.nan, math.inf, -math.inf, -math.inf
    for got, want in zip(megafuse.fuse(extremes)(x), extremes(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_every_operator_is_reachable_from_aten() -> None:
    assert set(BY_ATEN.values()) == set(pointwise.TABLE.values())
