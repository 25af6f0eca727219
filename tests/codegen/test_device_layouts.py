"""What the profile of many subgraphs taught about layouts on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megafuse
from megafuse.codegen import candidates, fit
from megafuse.codegen.candidates import CROWD, cuda_schedules
from megafuse.codegen.fit import LINE
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import Schedule, launch, together
from megafuse.device import H200
from megafuse.errors import InputError
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.fusion.walks import kept_axes

MANY = 1 << 20
HALF = torch.bfloat16


def first(plan: GraphPlan | None) -> tuple[GraphPlan, RowRegion, Schedule]:
    assert plan is not None
    region = next(r for r in plan.regions if isinstance(r, RowRegion))
    return plan, region, next(iter(cuda_schedules(region, MANY)))


def forward(f: object, *args: Tensor) -> tuple[GraphPlan, RowRegion, Schedule]:
    compiled = megafuse.fuse(f).build(*args)  # type: ignore[arg-type]
    assert compiled is not None
    return first(compiled.plan.forward)


def test_neighbouring_threads_take_a_line_of_a_short_row() -> None:
    for columns in (16, 64, 256):
        _, _, s = forward(lambda x: x.softmax(-1), torch.zeros(4, columns, dtype=HALF))
        assert s.team * s.stages[0].lanes >= min(columns, LINE)


def test_a_block_with_one_row_shares_its_multiprocessor() -> None:
    """Each reduction stops the whole block."""
    _, _, s = forward(lambda x: x.logsumexp(-1), torch.zeros(4, 16_384, dtype=HALF))
    assert s.teams == 1 and s.blocks * s.team // 32 >= CROWD
    _, _, s = forward(lambda x: x.logsumexp(-1), torch.zeros(4, 1280, dtype=HALF))
    assert s.teams > 1 and s.blocks == 1


def test_a_groups_block_has_threads_enough() -> None:
    def mix(x: Tensor) -> Tensor:
        y = x / x.float().norm(dim=-1, keepdim=True).to(x.dtype)
        return torch.softmax(y.reshape(-1, 4, 4, 8).transpose(1, 2).reshape(-1, 4, 32), -1)

    _, region, s = forward(mix, torch.ones(5, 4, 32, dtype=HALF))
    assert region.kind == "group" and s.threads >= 128


def test_a_tall_columns_sum_leaves_one_partial_a_block() -> None:
    plan, region, s = forward(lambda x: x.sum(0), torch.zeros(100, 8, dtype=HALF))
    assert s.teams == 256 and together(region, s)
    shape = launch(region, kept_axes(region), s, {"s0": MANY}, H200, 4)
    assert shape.parts % s.teams == 0 and shape.grid == shape.parts // s.teams == 512
    few = launch(region, kept_axes(region), s, {"s0": 3}, H200, 4)  # fewer rows than teams
    assert few.parts == s.teams and few.grid == 1
    source = emit_rows(region, plan.buffers, s, False, "mf_test").source
    assert "write_block(team)" in source and "(i) * 256" in source


def test_parts_take_rows_one_after_the_other_where_a_kept_index_has_few() -> None:
    def bias(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        return y, y.sum(0)

    for tokens, in_turn in ((64, False), (4, True)):
        _, _, s = forward(bias, torch.zeros(5, tokens, 1024, dtype=HALF))
        assert s.in_turn == in_turn


def test_layouts_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row's vectors may be takes index arithmetic over all reads: once a question."""
    def bias(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1)
        return y, y.sum(0)

    _, region, _ = forward(bias, torch.zeros(5, 4, 1024, dtype=HALF))
    asked: list[int] = []

    def counted(region: RowRegion, elements: int) -> tuple[int, int]:
        asked.append(elements)
        return fit.team_of(region, elements)

    lanes, known = fit._lanes, []
    monkeypatch.setattr(candidates, "team_of", counted)
    monkeypatch.setattr(fit, "_lanes", lambda stage: known.append(stage) or lanes(stage))
    layouts = list(cuda_schedules(region, MANY))
    assert sorted(asked) == sorted(candidates.ELEMENTS)
    ways = len(candidates.ELEMENTS) * len(candidates.COLUMN_WAYS)
    assert len(known) <= len(region.stages) * (len(asked) + ways) and layouts


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    def scale(x: Tensor) -> Tensor:
        return x.softmax(-1)

    _, region, s = forward(scale, torch.zeros(4, 16, dtype=HALF))
    with pytest.raises(InputError, match=r"test_device_layouts.py:\d+.*: 2,147,483,648 rows"):
        launch(region, kept_axes(region), s, {"s0": 1 << 31}, H200, 4)
    assert launch(region, kept_axes(region), s, {"s0": 1 << 30}, H200, 4).parts


def test_sums_for_many_kept_indices_stay_apart() -> None:
    """A sum over two rows for each of thousands: a block for each would idle."""
    _, region, s = forward(
        lambda x: x.sum(1), torch.zeros(5, 2, 8, dtype=HALF)
    )  # kept: the batch, a run-time size
    assert not together(region, s)


def test_small_groups_share_a_multiprocessor() -> None:
    """Some bring their rows in while others compute."""

    def mix(x: Tensor) -> Tensor:
        y = x / x.float().norm(dim=-1, keepdim=True).to(x.dtype)
        return torch.softmax(y.reshape(-1, 8, 8, 32).transpose(1, 2).reshape(-1, 8, 256), -1)

    plan, region, s = forward(mix, torch.ones(5, 8, 256, dtype=HALF))
    assert region.kind == "group" and s.shelf and s.blocks > 1
    kernel = emit_rows(region, plan.buffers, s, False, "mf_test")
    assert s.blocks * (kernel.shared + 1024) <= 227 * 1024
