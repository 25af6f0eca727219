"""The device header itself, run on a CPU: barriers, shuffles and alignment included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tile_examples as examples
from tile_checks import (
    Launch,
    address,
    aligned,
    check_column_sum,
    check_flags,
    check_gate,
    check_mixing,
)
from tile_examples import Shape

from megafuse.runtime import source
from megafuse.runtime.host import HostModule, build_host

TILE = Path(source.__file__).parent.parent / "codegen" / "tile"


def emulated_module(
    code: str, names: Sequence[str], fast: bool = False, wide: bool = False
) -> HostModule:
    """The kernels of `code` behind launches `emulate_NAME`, called with the geometry (grid x, y,
    block x, y) and the kernel's arguments."""
    emulated = (Path(__file__).parent / "emulated.h").read_text()
    text = source.header("cuda.cuh", emulated)
    if wide:  # in a namespace of its own: a process holds one copy of an inline function's statics
        text = "#define MF_WIDE 1\n#define mf mf_wide\n" + text
    entries = "".join(
        f"""
extern "C" void emulate_{name}(const i64* a) {{
  emulated::launch(a[0], a[1], a[2], a[3], [&] {{ {name}(*(const {name}::Args*)(a + 4)); }});
}}
"""
        for name in names
    )
    return build_host(
        text + code + entries, [f"emulate_{name}" for name in names], fast=fast, debug=True
    )


def emulate(
    code: str, shape: Shape, names: Sequence[str], fast: bool = False, wide: bool = False
) -> Launch:
    """The kernels of `code` behind launches that pick the grid as a launcher does."""
    module = emulated_module(code, names, fast, wide)

    def launch(name: str, args: Sequence[int]) -> None:
        geometry = [2, 1, shape.team * shape.teams, 1]
        if name.endswith("_finish"):
            geometry = [3, 6, 32, 8]
        elif name != "f1":
            parts = args[-2]
            geometry[0] = -(-parts // shape.teams)
        module.launch(f"emulate_{name}", [*geometry, *args])

    return launch


SHAPES = [
    Shape(72, 8, 16, 2),  # two teams share a warp; dead vectors
    Shape(7, 1, 8, 3),  # several teams a warp, three of four running
    Shape(6, 2, 1, 4),  # a thread a row, fewer lanes than sums
    Shape(264, 4, 64, 2),  # named barriers, dead vectors
    Shape(2560, 8, 160),
    Shape(1281, 1, 672),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: Shape) -> None:
    dtype = "bf16" if shape.columns == 2560 else "float"
    code = examples.gate_forward(shape, dtype) + examples.gate_backward(shape, dtype)
    launch = emulate(code, shape, ["f3", "b3", "b3_finish"], fast=dtype == "bf16")
    check_gate(launch, shape.columns, dtype, rows=11, parts=3)


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 3, 5)], ids=str)
def test_a_wide_gate_is_rounded_once(shape: Shape) -> None:
    code = examples.gate_forward(shape, "float") + examples.gate_backward(shape, "float")
    launch = emulate(code, shape, ["f3", "b3", "b3_finish"], wide=True)
    check_gate(launch, shape.columns, "float", rows=11, parts=3, rounded_once=True)


@pytest.mark.parametrize("steps,long", [("MF_STEPS", ""), ("MF_LOOP", "long_")])
def test_a_wide_gate_over_several_vectors(steps: str, long: str) -> None:
    shape = Shape(264, 4, 32)
    code = examples.gate_forward(shape, "float", steps, long)
    code += examples.gate_backward(shape, "float", steps, long)
    launch = emulate(code, shape, ["f3", "b3", "b3_finish"], wide=True)
    check_gate(launch, shape.columns, "float", rounded_once=True)


def test_long_rows() -> None:
    shape = Shape(2568, 8, 64, 1)
    code = examples.gate_forward(shape, "f16", "MF_LOOP", "long_")
    code += examples.gate_backward(shape, "f16", "MF_LOOP", "long_")
    check_gate(emulate(code, shape, ["f3", "b3", "b3_finish"]), shape.columns, "f16")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [Shape(80, 4, 4, 8), Shape(80, 4, 64, 2)])
def test_group(shape: Shape, wide: bool) -> None:
    launch = emulate(examples.mixing(shape, 4, "float"), shape, ["f1"], wide=wide)
    check_mixing(launch, groups=5, tokens=4, columns=80)


@pytest.mark.parametrize("rows,parts", [(4096, 1), (4096, 7), (15, 1), (33, 2)])
def test_a_float32_column_sum_keeps_its_low_bits(rows: int, parts: int) -> None:
    check_column_sum(summing(wide=False), 24, rows, parts, units=2.2)


@pytest.mark.parametrize("rows,parts,units", [(4096, 1, 0.51), (15, 1, 0.51), (33, 3, 0.8)])
def test_a_wide_column_sum_is_rounded_once_a_part(rows: int, parts: int, units: float) -> None:
    check_column_sum(summing(wide=True), 24, rows, parts, units)


def summing(wide: bool) -> Launch:
    shape = Shape(24, 4, 4, 1)
    return emulate(examples.column_sum(shape), shape, ["sums", "sums_finish"], wide=wide)


@pytest.mark.parametrize("shape", [Shape(24, 8, 2, 2), Shape(7, 1, 4, 1)], ids=str)
def test_flags_are_stored(shape: Shape) -> None:
    check_flags(emulate(examples.flags(shape), shape, ["flags"]), shape.columns)


@pytest.mark.parametrize(
    "team,wide",
    [*((team, False) for team in (1, 8, 32, 96, 416, 512, 544, 1024)),
     *((team, True) for team in (8, 96, 512, 1024))],
)  # fmt: skip
def test_reductions_of_every_size(team: int, wide: bool) -> None:
    """One to nine values at once over every kind of team, the same in all of its threads; exact,
    because the data are integers."""
    shape = Shape(team, 1, team, 2 if team <= 512 else 1)
    counts = (1, 3, 9)
    launch = emulate(
        "".join(several_reductions(shape, count) for count in counts),
        shape,
        [f"r{count}" for count in counts],
        wide=wide,
    )
    x = np.random.default_rng(team).integers(-50, 50, (3, team)).astype(np.float32)
    x = aligned(x)
    for count in counts:
        out = np.full((3, 32), np.nan, np.float32)
        seen = aligned(np.full((3, count, 2, team), np.nan, np.float32))
        launch(f"r{count}", [address(x), address(out), address(seen), 3, 0])
        np.testing.assert_array_equal(seen[:, :, 0], seen[:, :, 0, :1].repeat(team, 2))
        np.testing.assert_array_equal(seen[:, :, 1], seen[:, :, 1, :1].repeat(team, 2))
        for k in range(count):
            np.testing.assert_array_equal(out[:, 3 * k], x.sum(1) * (k + 1))
            np.testing.assert_array_equal(out[:, 3 * k + 1], x.max(1) * (k + 1))


def several_reductions(shape: Shape, count: int) -> str:
    values = ", ".join(f"s{k}" for k in range(count))
    adds = " ".join(f"s{k}.add(team, 0, v * {k + 1}.f);" for k in range(count))
    stores = " ".join(
        f"team.store(a.out + team.part() * 32 + {3 * k}, sums[{k}]);"
        f"team.store(a.out + team.part() * 32 + {3 * k + 1}, most[{k}]);"
        f"all({2 * k}, sums[{k}]); all({2 * k + 1}, most[{k}]);"
        for k in range(count)
    )
    return f"""
struct r{count} {{
  {shape.head()}
  struct Args {{ const float* x; float* out; float* seen; i64 parts; i64 unused; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {shape.cols()};
    const auto same = [](int c) {{ return c; }};
    const auto all = [&](int i, mf::real v) {{
      float* to = a.seen + (team.part() * {2 * count} + i) * {shape.columns};
      mf::store<C, float, 1>(team, 0, to, same, mf::Vec<1>(v));
    }};
    auto x = mf::stream<C, float, 1>([](int c) {{ return c; }});
    x.fetch(team, a.x + team.part() * {shape.columns});
    x.advance();
    const auto v = x.at(team, 0);
    mf::Pack<{count}> sums, most;
    {{ mf::Sum<C> {values}; {adds} sums = team.sum({values}); }}
    {{ mf::Max<C> {values}; {adds} most = team.max({values}); }}
    {stores}
  }}
}};
MF_KERNEL(r{count})
"""


@pytest.mark.parametrize("team,lanes,steps", [(1, 4, 3), (4, 4, 3), (32, 8, 5), (96, 4, 2)])
def test_moments_in_one_reduction(team: int, lanes: int, steps: int) -> None:
    """Sum and squared deviations: of numbers far from zero, of rows that begin with an outlier, and
    exactly nothing for a constant row; the same in all threads."""
    columns = team * lanes * steps
    shape = Shape(columns, lanes, team, 2)
    random = np.random.default_rng(team)
    x = random.standard_normal((4, columns)).astype(np.float32)
    x[1] += 3000
    x[2, 0], x[3] = 1e4, 1 / 3
    x = aligned(x)
    seen = aligned(np.full((4, 2, team), np.nan, np.float32))
    launch = emulate(both_moments(shape), shape, ["moments"])
    launch("moments", [address(x), address(seen), 4, 0])
    np.testing.assert_array_equal(seen, seen[:, :, :1].repeat(team, 2))
    wide = x.astype(np.float64)
    squares = ((wide - wide.mean(1, keepdims=True)) ** 2).sum(1)
    # The mean to half a unit of the row's largest element, whichever element that is.
    assert (np.abs(seen[:, 0, 0] - wide.sum(1)) <= columns * np.abs(wide).max(1) * 2.0**-24).all()
    np.testing.assert_allclose(seen[:3, 1, 0], squares[:3], rtol=2e-6)
    assert seen[3, 1, 0] <= 1e-9 * columns


def both_moments(shape: Shape) -> str:
    return f"""
struct moments {{
  {shape.head()}
  struct Args {{ const float* x; float* seen; i64 parts; i64 unused; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {shape.cols()};
    using E = mf::Cols<{shape.team}, 1, {shape.team}, 1>;
    const auto same = [](int c) {{ return c; }};
    auto x = mf::stream<C, float, {shape.run}>(same);
    x.fetch(team, a.x + team.part() * {shape.columns});
    x.advance();
    mf::Moments<C> both;
    MF_STEPS(j, C) both.add(team, j, x.at(team, j));
    const auto got = team.moments(both);
    float* to = a.seen + team.part() * {2 * shape.team};
    mf::store<E, float, 1>(team, 0, to, same, mf::Vec<1>(got[0]));
    mf::store<E, float, 1>(team, 0, to + {shape.team}, same, mf::Vec<1>(got[1]));
  }}
}};
MF_KERNEL(moments)
"""
