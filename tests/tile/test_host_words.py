"""The host meaning of every tile word, against numpy."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tile_examples as examples
from tile_checks import (
    address,
    check_column_sum,
    check_flags,
    check_gate,
    check_mixing,
    from_bf16,
    to_bf16,
)
from tile_examples import Shape

from megafuse.runtime.host import HostModule, build_host, sanitizer_env

SIZES = (1, 7, 72, 1280, 2561)


@pytest.mark.parametrize("fast", [True, False])
def test_conversions_round_as_ieee_does(fast: bool) -> None:
    source = """
struct narrow {
  using Team = mf::Team<1, 1>;
  struct Args { const float* x; bf16* b; f16* h; float* rb; float* rh; i64 parts; };
  MF_FN static void run(const Team& team, const Args& a) {
    using C = mf::Cols<16, 16, 1, 1>;
    const auto same = [](int c) { return c; };
    auto x = mf::stream<C, float, 16>(same);
    x.fetch(team, a.x + team.part() * 16);
    x.advance();
    const auto v = x.at(team, 0);
    mf::store<C, bf16, 16>(team, 0, a.b + team.part() * 16, same, v);
    mf::store<C, f16, 16>(team, 0, a.h + team.part() * 16, same, v);
    mf::store<C, float, 16>(team, 0, a.rb + team.part() * 16, same, mf::to_bf16(v));
    mf::store<C, float, 16>(team, 0, a.rh + team.part() * 16, same, mf::to_f16(v));
  }
};
MF_KERNEL(narrow)
struct widen {
  using Team = mf::Team<1, 1>;
  struct Args { const f16* h; float* x; i64 parts; };
  MF_FN static void run(const Team& team, const Args& a) {
    using C = mf::Cols<16, 16, 1, 1>;
    const auto same = [](int c) { return c; };
    auto x = mf::stream<C, f16, 16>(same);
    x.fetch(team, a.h + team.part() * 16);
    x.advance();
    mf::store<C, float, 16>(team, 0, a.x + team.part() * 16, same, x.at(team, 0));
  }
};
MF_KERNEL(widen)
"""
    module = build_host(source, ["narrow", "widen"], fast=fast)

    halves = np.arange(65536, dtype=np.uint16)
    wide = np.empty(65536, np.float32)
    module.launch("widen", [address(halves), address(wide), 4096])
    np.testing.assert_array_equal(wide, halves.view(np.float16).astype(np.float32))

    # Every half, the points halfway to its neighbour and just beside them, and random bits.
    bits = np.random.default_rng(0).integers(0, 2**32, 65536, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        middle = wide + np.float32(2.0**-11) * np.maximum(np.abs(wide), np.float32(2.0**-14))
        x = np.concatenate(
            [wide, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(9e9)), bits,
             from_bf16(halves), from_bf16(halves) * np.float32(1 + 2.0**-9)]
        ).astype(np.float32)  # fmt: skip
    b, h = np.empty(x.size, np.uint16), np.empty(x.size, np.float16)
    rb, rh = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
    args = [address(v) for v in (x, b, h, rb, rh)]
    module.launch("narrow", [*args, x.size // 16])
    real = ~np.isnan(x)
    np.testing.assert_array_equal(b[real], to_bf16(x)[real])
    np.testing.assert_array_equal(rb[real], from_bf16(b)[real])
    assert np.isnan(from_bf16(b)[~real]).all() and np.isnan(h[~real]).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(h[real], x.astype(np.float16)[real])
    np.testing.assert_array_equal(rh, h.astype(np.float32))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.round,
    "relu": lambda x: np.maximum(x, 0), "neg": np.negative, "square": np.square,
    "logical_not": lambda x: (x == 0).astype(float), "exp2": np.exp2, "log2": np.log2,
    "erf": np.vectorize(math.erf),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "max": np.maximum, "min": np.minimum, "pow": np.power, "div": np.divide,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["float", "double"])
def pointwise(shared_cache: Path, request: pytest.FixtureRequest) -> HostModule:
    os.environ["MEGAFUSE_CACHE"] = str(shared_cache)

    def kernel(name: str, value: str) -> str:
        return f"""
struct k_{name} {{
  using Team = mf::Team<1, 1>;
  struct Args {{ const float* x; const float* y; float* out; i64 rows; i64 parts; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = mf::Cols<40, 16, 1, 3>;
    const auto same = [](int c) {{ return c; }};
    auto x = mf::stream<C, float, 16>(same);
    auto y = mf::stream<C, float, 16>(same);
    const auto fetch = [&](i64 r) {{ x.fetch(team, a.x + r * 40); y.fetch(team, a.y + r * 40); }};
    const auto advance = [&] {{ x.advance(); y.advance(); }};
    mf::rows(0, a.rows, 1, [](i64 r) {{ return r; }}, fetch, advance, [&](i64 row) {{
      MF_STEPS(j, C) {{
        const auto v = x.at(team, j);
        const auto w = y.at(team, j);
        mf::store<C, float, 16>(team, j, a.out + row * 40, same, {value});
      }}
    }});
  }}
}};
MF_KERNEL(k_{name})"""

    bodies = {name: f"mf::{name}(v)" for name in FUNCTIONS}
    bodies |= {name: f"mf::{name}(v, w)" for name in BINARY}
    bodies["where"] = "mf::where(v > 0.f, w, -1)"
    bodies["mixed"] = "2 - 3 * v / (w + 1.5f) * 0.5f - (-w)"
    bodies["left"] = "mf::max(0.25f, v) + mf::where(v, 1.f, w) + (0.f < v)"
    source = "\n".join(kernel(name, value) for name, value in bodies.items())
    return build_host(source, [f"k_{name}" for name in bodies], fast=request.param)


def evaluate(module: HostModule, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = np.full_like(x, np.nan)
    module.launch(f"k_{name}", [address(x), address(y), address(out), x.size // 40, 1])
    return out


def operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    x = (random.standard_normal(4000) * 8).astype(np.float32)
    y = (random.standard_normal(4000) * 2).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 1.5, 2.5], np.float32)
    a, b = np.meshgrid(special, special)
    x[:100], y[:100] = a.ravel(), b.ravel()
    x[100:140] = np.linspace(-110, 95, 40)
    return x, y


@pytest.mark.parametrize("name", [*FUNCTIONS, *BINARY])
def test_functions_within_two_ulp(pointwise: HostModule, name: str) -> None:
    x, y = operands()
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64), y.astype(np.float64)
        want = FUNCTIONS[name](wide[0]) if name in FUNCTIONS else BINARY[name](*wide)
        want = want.astype(np.float64)
        got = evaluate(pointwise, name, x, y).astype(np.float64)
        rounded = want.astype(np.float32)
    finite = np.isfinite(rounded) & np.isfinite(got)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~finite & ~np.isnan(got)], rounded[~finite & ~np.isnan(got)])
    step = np.spacing(np.maximum(np.abs(rounded[finite]), np.float32(2.0**-126)))
    limit = 2.5 * step
    if name == "sigmoid":  # below the normal range it is 0, as 1 / (1 + exp(-x)) is in eager
        limit = 3.5 * step + 2.0**-126
    assert (np.abs(got[finite] - want[finite]) <= limit).all()


def test_vectors_and_scalars_mix(pointwise: HostModule) -> None:
    x, y = (v[200:] for v in operands())
    x, y = x.copy(), y.copy()
    np.testing.assert_array_equal(evaluate(pointwise, "where", x, y), np.where(x > 0, y, -1))
    np.testing.assert_allclose(
        evaluate(pointwise, "mixed", x, y), 2 - 3 * x / (y + 1.5) * 0.5 + y, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        evaluate(pointwise, "left", x, y), np.maximum(0.25, x) + 1 + (x > 0), rtol=1e-6
    )


@pytest.mark.parametrize(
    "columns,dtype",
    [(1, "float"), (72, "float"), (1280, "float"), (72, "bf16"), (2561, "f16")],
)
def test_gate_forward_and_backward(columns: int, dtype: str) -> None:
    shape = Shape(columns, 32)
    source = examples.gate_forward(shape, dtype) + examples.gate_backward(shape, dtype)
    module = build_host(source, ["f3", "b3", "b3_finish"], fast=dtype != "float")
    check_gate(module.launch, columns, dtype, rounded_once=dtype == "float" and columns > 1)


@pytest.mark.parametrize("rows,parts,units", [(4096, 1, 0.51), (4096, 7, 0.8), (3, 1, 0.51)])
def test_a_float32_column_sum_keeps_its_low_bits(rows: int, parts: int, units: float) -> None:
    module = build_host(examples.column_sum(Shape(70, 32)), ["sums", "sums_finish"])
    check_column_sum(module.launch, 70, rows, parts, units)


@pytest.mark.parametrize("fast", [True, False])
def test_flags_are_stored(fast: bool) -> None:
    module = build_host(examples.flags(Shape(70, 32)), ["flags"], fast=fast)
    check_flags(module.launch, 70)


def test_a_long_rows_sum_keeps_its_low_bits() -> None:
    columns = 1_000_003
    module = build_host(reduction(columns), ["reduce"])
    x = np.random.default_rng(0).random(columns, np.float32)
    out = np.empty(3, np.float32)
    module.launch("reduce", [address(x), address(out), 1])
    assert abs(out[0] - x.sum(dtype=np.float64)) <= 1e-6 * out[0]
    assert out[1] == x.max() and out[2] == x.min()
    x[columns - 1] = np.nan
    module.launch("reduce", [address(x), address(out), 1])
    assert np.isnan(out).all()


@pytest.mark.parametrize("fast", [True, False])
def test_reductions_leave_dead_lanes_out(fast: bool) -> None:
    names = [f"reduce{columns}" for columns in SIZES]
    source = "".join(map(reduction, SIZES, names))
    module = build_host(source, names, fast=fast)
    for columns, name in zip(SIZES, names, strict=True):
        for value in (-3, 3):
            x, out = np.full(columns, value, np.float32), np.empty(3, np.float32)
            module.launch(name, [address(x), address(out), 1])
            assert out.tolist() == [value * columns, value, value]


def reduction(columns: int, name: str = "reduce") -> str:
    return f"""
struct {name} {{
  using Team = mf::Team<1, 1>;
  struct Args {{ const float* x; float* out; i64 parts; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {Shape(columns, 32).cols()};
    auto x = mf::long_stream<C, float, 16>([](int c) {{ return c; }});
    x.fetch(team, a.x);
    x.advance();
    mf::Sum<C> sum;
    mf::Max<C> most;
    mf::Min<C> least;
    MF_LOOP(j, C) {{
      sum.add(team, j, x.at(team, j));
      most.add(team, j, x.at(team, j));
      least.add(team, j, x.at(team, j));
    }}
    team.store(a.out, team.sum(sum)[0]);
    team.store(a.out + 1, team.max(most)[0]);
    team.store(a.out + 2, team.min(least)[0]);
  }}
}};
MF_KERNEL({name})
"""


@pytest.mark.parametrize("tokens,width", [(3, 4), (8, 16)])
def test_group_mixes_rows_through_piecewise_maps(tokens: int, width: int) -> None:
    columns, groups = tokens * width, 3
    module = build_host(examples.mixing(Shape(columns, 32), tokens, "float"), ["f1"])
    check_mixing(module.launch, groups, tokens, columns)


def test_loadable_types_splats_and_keeps() -> None:
    source = """
struct kinds {
  using Team = mf::Team<1, 1>;
  struct Args { const bool8* b; const int* i; const i64* l; float* out; i64 parts; };
  MF_FN static void run(const Team& team, const Args& a) {
    using C = mf::Cols<20, 8, 1, 3>;
    const auto same = [](int c) { return c; };
    auto b = mf::stream<C, bool8, 8>(same);
    auto i = mf::splat<C, int, 4>([](int c) { return c / 4; });
    const auto l = mf::hold_splat<C, i64, 8>(team, a.l, [](int c) { return c / 16; });
    mf::Scalar<i64> s;
    b.fetch(team, a.b); b.advance();
    i.fetch(team, a.i); i.advance();
    s.fetch(a.l); s.turn(); s.pick(team, 0);
    mf::Keep<C> kept;
    MF_STEPS(j, C) kept.put(j, b.at(team, j) * i.at(team, j) + l.at(team, j) * s.value());
    MF_STEPS(j, C) mf::store<C, float, 4>(team, j, a.out, same, kept.at(j));
  }
};
MF_KERNEL(kinds)
"""
    module = build_host(source, ["kinds"])
    flags = (np.arange(20) % 3).astype(np.uint8)
    ints, longs = np.arange(5, dtype=np.int32) - 2, np.array([5, -7], np.int64)
    out = np.full(24, 9, np.float32)
    module.launch("kinds", [*(address(v) for v in (flags, ints, longs, out)), 1])
    c = np.arange(20)
    np.testing.assert_array_equal(out[:20], (flags > 0) * ints[c // 4] + longs[c // 16] * 5)
    assert (out[20:] == 9).all()


def test_finish_adds_the_chosen_partials_in_order() -> None:
    source = """
struct fin {
  struct Args { const float* partials; bf16* out; };
  MF_FN static void run(const mf::Finisher& f, const Args& a) {
    f.column<bf16>(0, a.partials, 70, 3, 4, [](i64 k, i64 i) { return i * 3 + k; },
                   [&](i64 k, int c) { return a.out + k * 100 + c; });
  }
};
MF_FINISH(fin)
"""
    module = build_host(source, ["fin"])
    partials = np.random.default_rng(3).standard_normal((4, 3, 70)).astype(np.float32)
    out = np.zeros((3, 100), np.uint16)
    module.launch("fin", [address(partials), address(out)])
    want = ((partials[0] + partials[1]) + partials[2]) + partials[3]
    np.testing.assert_array_equal(out[:, :70], to_bf16(want))
    assert (out[:, 70:] == 0).all()


SANITIZED = """
import sys, numpy as np
from megafuse.runtime.host import build_host
source = '''
struct twice {
  using Team = mf::Team<1, 1>;
  struct Args { const float* x; float* out; i64 parts; };
  MF_FN static void run(const Team& team, const Args& a) {
    using C = mf::Cols<72, 32, 1, 3>;
    const auto same = [](int c) { return c; };
    const auto x = mf::hold<C, float, 32>(team, a.x, same);
    MF_STEPS(j, C) mf::store<C, float, 32>(team, j, a.out, same, x.at(team, j) * 2);
  }
};
MF_KERNEL(twice)
'''
module = build_host(source, ["twice"], sanitize=True)
x, out = np.ones(72, np.float32), np.empty(72 if sys.argv[1] == "whole" else 70, np.float32)
module.launch("twice", [x.ctypes.data, out.ctypes.data, 1])
print("clean")
"""


@pytest.mark.parametrize("case", ["whole", "short"])
def test_sanitizers_see_a_store_past_the_end(case: str, shared_cache: Path) -> None:
    environment = os.environ | sanitizer_env() | {"MEGAFUSE_CACHE": str(shared_cache)}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, case],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if case == "whole":
        assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-3000:]
    else:
        assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
