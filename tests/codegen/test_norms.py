"""Norms in fewer instructions: one reduction for both moments, differences scaled at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support import block_case
from torch import Tensor, nn

import megafuse
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.fit import layouts_of, with_shelf
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import Schedule, host_schedule
from megafuse.fusion.plan import GraphPlan, RowRegion

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compile_headline as headline

Region = tuple[GraphPlan, RowRegion]


def regions(f: object, *args: Tensor) -> list[Region]:
    compiled = megafuse.fuse(f).build(*args)
    assert compiled is not None
    return [(p, r) for p in (compiled.plan.forward, compiled.plan.backward) if p is not None
            for r in p.regions if isinstance(r, RowRegion)]  # fmt: skip


def source(region: Region, rounding: bool = False, **how: object) -> str:
    plan, rows = region
    stages = layouts_of(rows, 4, 8)
    schedule = Schedule(4, 2, stages, **how)  # type: ignore[arg-type]
    return emit_rows(rows, plan.buffers, schedule, rounding, "mf_test").source


def statistics(x: Tensor) -> Tensor:
    """By its standard deviation, but about zero."""
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    return (wide * (away * away).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


def test_statistics_alone_take_one_reduction() -> None:
    (region,) = regions(statistics, torch.randn(6, 64).bfloat16())
    assert "team.moments(" in source(region) and "team.sum(" not in source(region)
    assert "team.moments(" not in source(region, rounding=True)
    assert "team.moments(" not in source(region, once=False)
    plan, rows = region
    host = emit_rows(rows, plan.buffers, host_schedule(rows), False, "mf_test").source
    assert "moments" not in host


@pytest.mark.parametrize("columns,dtype", [(64, torch.float32), (72, torch.bfloat16)])
def test_storage_of_32_bits_and_uneven_rows_take_two(columns: int, dtype: torch.dtype) -> None:
    (region,) = regions(statistics, torch.randn(6, columns).to(dtype))
    assert "team.moments(" not in source(region)


def test_a_norm_applied_at_once_has_its_deviations_anyway() -> None:
    norm = nn.LayerNorm(64, dtype=torch.bfloat16)
    forward, *rest = regions(norm, torch.randn(6, 64, requires_grad=True).bfloat16())
    assert "team.moments(" not in source(forward) and "mf::fma(" not in source(forward)
    # Backward has the statistics, and needs the normalised value only.
    assert any("mf::fma(" in source(r) for r in rest)
    assert not any("mf::fma(" in source(r, rounding=True) for r in rest)


def groups(*shape: int) -> list[Region]:
    case = block_case(shape, torch.bfloat16)
    return [r for r in regions(case.module, *case.args) if r[1].kind == "group"]


def test_a_groups_small_tensors_are_unpacked_once() -> None:
    forward, backward = groups(3, 16, 64, 2)
    for plan, region in (forward, backward):
        schedule = next(s for s in cuda_schedules(region, 1 << 20) if s.shelf and s.pinned)
        text = emit_rows(region, plan.buffers, schedule, False, "mf_test").source
        assert text.count("mf::pin(") == len(schedule.pinned)
        plain = with_shelf(region, schedule, pin=False)
        assert plain is not None and not plain.pinned


def test_offsets_that_repeat_are_one() -> None:
    """Sixteen tokens of four columns: the first norm's parameters repeat every four."""
    (plan, region), _ = groups(3, 16, 64, 2)
    schedule = next(s for s in cuda_schedules(region, 1 << 20) if s.pinned)
    text = emit_rows(region, plan.buffers, schedule, False, "mf_test").source
    assert "mf::table<C1, 4, 4>(team, [](int c) -> int { return (c % 4); })" in text


def test_a_group_without_column_sums_gets_more_warps() -> None:
    plan = headline.plan_block(headline.CASES[0])
    assert plan.backward is not None
    first, last = (next(r for r in g.regions if isinstance(r, RowRegion) and r.kind == "group")
                   for g in (plan.forward, plan.backward))  # fmt: skip
    schedule = next(iter(cuda_schedules(first, 1 << 16)))
    assert schedule.threads == 384 and schedule.hold
    assert next(iter(cuda_schedules(last, 1 << 16))).threads == 256
