"""Which tensors are turned in shared memory, by which tiles, and what it is thought to save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import megafuse
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import by_block, launch
from megafuse.codegen.turn import ROOM, Sheet, tile_for
from megafuse.device import H200
from megafuse.fusion import cost
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.fusion.rules.turn import turns

MANY = 1 << 20
HALF = torch.bfloat16


def first(f: Callable[..., Tensor], *args: Tensor) -> tuple[GraphPlan, RowRegion]:
    compiled = megafuse.fuse(f).build(*args)
    assert compiled is not None
    plan = compiled.plan.forward
    return plan, next(r for r in plan.regions if isinstance(r, RowRegion))


def image(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def last(x: Tensor) -> Tensor:
    """Channels last, in memory too."""
    return x.permute(0, 2, 3, 1).contiguous() * 2


def test_a_transposing_copy_turns_what_it_reads() -> None:
    plan, region = first(last, image(3, 48, 12, 10))
    (turn,) = turns(region)
    assert turn.extent == 12 * 10 and not turn.uses[0].made  # lines of an image are one axis
    tile = tile_for(region)
    assert tile is not None and [s.width for s in tile.sheets] == [8]
    source = emit_rows(region, plan.buffers, next(cuda_schedules(region, MANY)), False, "mf").source
    assert source.count("mf::turn_in<") == 1 and "mf::turn_out<" not in source
    assert source.count("team.block_sync();") == 2 and "MF_GROUP_KERNEL(mf)" in source


def test_and_the_way_back_what_it_writes() -> None:
    """A reduction makes the channels columns, so it is the result that lies across."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y + torch.softmax(x, 3).permute(0, 3, 1, 2)

    plan, region = first(f, image(3, 12, 10, 48), image(3, 48, 12, 10))
    (turn,) = turns(region)
    assert sorted(u.made for u in turn.uses) == [False, True]
    source = emit_rows(region, plan.buffers, next(cuda_schedules(region, MANY)), False, "mf").source
    assert source.count("mf::turn_in<") == source.count("mf::turn_out<") == 1
    assert "mf::store<" not in source


def test_few_rows_are_not_worth_a_tile() -> None:
    _, region = first(last, image(3, 48, 12, 10))
    assert all(s.tile is None for s in cuda_schedules(region, 360))


@pytest.mark.parametrize(
    "f,shape,dtype",
    [
        (lambda x: x * 2, (3, 48, 12, 10), HALF),  # nothing lies across
        (lambda x: (x > 0).permute(0, 2, 3, 1).contiguous(), (3, 48, 12, 10), torch.bool),
        (last, (3, 8, 12, 10), HALF),  # short rows: a warp has several of them side by side
    ],
)
def test_not_turned(f: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, region = first(f, image(*shape, dtype=dtype))
    assert tile_for(region) is None


def test_a_sum_kept_apart_keeps_its_axis_out_of_tiles() -> None:
    """A sum over the batch for each pixel and channel: a block cannot own several pixels."""
    bias, x = image(12, 10, 48).requires_grad_(), image(3, 48, 12, 10)
    compiled = megafuse.fuse(lambda b, x: torch.tanh(x.permute(0, 2, 3, 1) + b)).build(bias, x)
    assert compiled is not None and compiled.plan.backward is not None
    for region in compiled.plan.backward.regions:
        assert not isinstance(region, RowRegion) or tile_for(region) is None


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("shape", [(3, 192, 28, 28), (3, 768, 14, 14), (5, 33, 7, 3), (2, 4096, 9)])
def test_tiles_fit_and_are_cut_into_whole_accesses(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    _, region = first(lambda x: x.movedim(1, -1).contiguous() * 2, image(*shape, dtype=dtype))
    tile = tile_for(region)
    assert tile is not None and tile.nbytes <= ROOM
    for sheet in tile.sheets:
        assert tile.rows % sheet.width == 0 and tile.extent % sheet.width == 0
        assert sheet.pitch % 16 == sheet.skew % 16 == 0
        assert sheet.pitch >= sheet.columns * dtype.itemsize
    seen = 0
    for schedule in cuda_schedules(region, MANY):
        if schedule.tile is not None:
            seen += 1
            assert schedule.threads % 32 == 0 and schedule.blocks <= tile.blocks
            run = launch(region, [], schedule, {"s0": 64}, H200, 2)
            assert run.parts == run.grid and by_block(region, schedule)
            assert run.chunks * run.span >= tile.count(region, {"s0": 64})
    assert seen


def test_threads_of_a_warp_meet_different_banks() -> None:
    """What a warp places at once: one 4-byte word a thread, in 32 banks."""
    _, region = first(last, image(3, 192, 28, 28))
    tile = tile_for(region)
    assert tile is not None
    (sheet,) = tile.sheets
    down = sheet.rows // sheet.width

    def bank(thread: int, i: int, s: Sheet) -> int:
        row, column = thread % down * s.width + i, thread // down * 2
        return (row * s.pitch + row // s.width * s.skew + column * 2) // 4 % 32

    for i in range(sheet.width):
        banks = [bank(t, i, sheet) for t in range(32)]
        assert max(map(banks.count, banks)) <= 2


def test_sectors() -> None:
    assert cost.sectors(64, 0) == cost.sectors(64, 32) == 2
    assert cost.sectors(56, 32) == 2 and cost.sectors(56, 8) == 2.5 and cost.sectors(2, 2) == 1


def test_what_is_not_turned_is_predicted_to_cost_sectors() -> None:
    _, region = first(last, image(3, 192, 28, 28))
    assert cost.sectors_again(region, {"s0": 3}) == 0
    flags = image(3, 192, 28, 28, dtype=torch.bool)  # bytes are not turned
    _, region = first(lambda x: x.permute(0, 2, 3, 1).contiguous(), flags)
    again = cost.sectors_again(region, {"s0": 3})
    assert again >= 3 * flags[0].numel()
    assert cost.seconds(1000, 0, 1, H200, again=again) > cost.seconds(1000, 0, 1, H200)
