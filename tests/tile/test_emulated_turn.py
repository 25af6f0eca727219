"""Tensors turned in shared memory, on the emulated device: every tile, type and ragged end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_emulated_regions import Emulated, results
from torch import Tensor

import megafuse
from megafuse.codegen import turn
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import by_block
from megafuse.fusion import cost
from megafuse.fusion.plan import RowRegion
from megafuse.fusion.rules.turn import turns
from megafuse.runtime.executor import BuiltRegion

MANY = 1 << 20


def last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous() * 2


def first(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    """Back to channels first, with a scale for each channel and a residual."""
    return y + x.movedim(-1, 1) * gain[:, None]


def norm(x: Tensor) -> Tensor:
    """Over the channels of a tensor that lies channels first, and back."""
    y = x.transpose(1, 2)
    return (y + F.layer_norm(y, y.shape[2:])).transpose(1, 2)


def check(f: Callable[..., Tensor], *args: Tensor, rows: int = 0) -> int:
    """Regions that were turned, in tiles of `rows` rows or those preferred."""
    compiled = megafuse.fuse(f).build(*args)
    assert compiled is not None and compiled.forward is not None
    seen = 0
    for executor in (compiled.forward, compiled.backward):
        for region in executor.plan.regions if executor is not None else ():
            if not isinstance(region, RowRegion):
                continue
            schedules = [s for s in cuda_schedules(region, MANY) if s.tile is not None]
            if rows:
                found = cost.turned(region)
                assert found is not None
                tile = turn._tile(found, rows, int(region.stages[0].columns()))  # type: ignore[call-overload]
                schedules = [replace(s, tile=tile) for s in schedules[:1]]
            assert executor is not None
            sizes = dict(executor.plan.sizes)
            for schedule in {(s.team, s.teams, s.hold): s for s in schedules}.values():
                kernel = emit_rows(region, executor.plan.buffers, schedule, False, "mf_test")
                module: Any = Emulated(kernel, by_block(region, schedule))
                expected = results(executor, executor.built[region.name], sizes)
                got = results(executor, BuiltRegion(region, kernel, module, 1), sizes)
                step = 2**-7 if args[0].dtype != torch.float32 else 2**-20
                for key, value in got.items():
                    error = (value - expected[key]).norm()
                    assert error <= step * expected[key].norm(), f"{region.name} {key} {schedule}"
            seen += bool(schedules)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pixels", [1 << 5, 100, 49, 90])  # wide accesses, 4 rows, 1 row, 2 rows
def test_a_copy(pixels: int, dtype: torch.dtype) -> None:
    assert check(last, torch.randn(3, 40, pixels, dtype=dtype)) == 1


@pytest.mark.parametrize("channels,pixels", [(33, 35), (35, 64), (64, 33), (17, 18), (1, 40)])
def test_awkward_extents(channels: int, pixels: int) -> None:
    turned = check(last, torch.randn(2, channels, pixels).bfloat16())
    assert turned == (channels >= 16)


@pytest.mark.parametrize("rows", [8, 16, 24, 64])
def test_every_tile(rows: int) -> None:
    """More rows than there are, an end in the middle of a tile, several tiles."""
    assert check(last, torch.randn(3, 32, 40).bfloat16(), rows=rows) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pointwise_work_on_the_way_back(dtype: torch.dtype) -> None:
    x, y = torch.randn(4, 12, 8, 48, dtype=dtype), torch.randn(4, 48, 12, 8, dtype=dtype)
    gain = torch.randn(48, 1, dtype=dtype)
    for t in (x, y, gain):
        t.requires_grad_()
    assert check(first, x, y, gain) == 1  # backward is a group, whose stages turn nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [36, 23])
def test_reductions_and_column_sums(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 40, length, dtype=dtype, requires_grad=True)
    assert check(norm, x) == 2

    def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, 2), (40,), weight, bias).transpose(1, 2)

    weight = torch.randn(40, dtype=dtype, requires_grad=True)
    assert check(affine, x, weight, torch.randn(40, dtype=dtype, requires_grad=True)) == 2


def test_types_mix() -> None:
    """A wide residual that lies across, beside a narrow one that does not."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x.transpose(1, 2).float() + y, -1).to(y.dtype)

    x, y = torch.randn(3, 40, 36), torch.randn(3, 36, 40).bfloat16()
    assert check(f, x, y) == 1


@pytest.mark.parametrize("batch", [37, 128])
def test_a_run_time_extent_is_an_axis_too(batch: int) -> None:
    """A product's [40, batch], read as rows of 40: the stride is the batch, of any size."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax((w @ x.transpose(0, 1)).transpose(0, 1), -1)

    x, w = torch.randn(batch, 24), torch.randn(40, 24)
    compiled = megafuse.fuse(f).build(x, w)
    assert compiled is not None
    found = [r for r in compiled.plan.forward.regions if isinstance(r, RowRegion) if turns(r)]
    assert found and not isinstance(turns(found[0])[0].extent, int)
    assert check(f, x, w) == 1
