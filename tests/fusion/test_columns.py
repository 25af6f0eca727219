"""Rows of stages that reduce none: as long as every tensor lies together, and no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import megafuse
from megafuse.fusion.columns import ENOUGH, MOST
from megafuse.fusion.plan import RowRegion, Stage


def stages(f: Callable[..., Tensor], *args: Tensor) -> list[Stage]:
    compiled = megafuse.fuse(f).build(*args)
    assert compiled is not None
    regions = [r for r in compiled.plan.forward.regions if isinstance(r, RowRegion)]
    return [s for r in regions for s in r.stages]


IMAGE = torch.randn(3, 5, 8, 16)


@pytest.mark.parametrize(
    "other,columns",
    [
        ((3, 5, 8, 16), 5 * 8 * 16),  # everything but the batch
        ((5, 1, 1), 8 * 16),  # one value a channel: its pixels
        ((8, 1), 16),  # one a line
        ((1, 16), 16),  # the same for every line
        ((8, 16), 8 * 16),  # the same for every channel
    ],
    ids=str,
)
def test_dimensions_that_lie_together_are_one_row(other: tuple[int, ...], columns: int) -> None:
    (stage,) = stages(lambda x, y: x * y, IMAGE, torch.randn(other))
    assert stage.columns() == columns


def test_a_transposed_operand_keeps_them_apart() -> None:
    (stage,) = stages(lambda x, y: x * y.transpose(2, 3), IMAGE, torch.randn(3, 5, 16, 8))
    assert stage.columns() == 16


def test_rows_have_an_end() -> None:
    (stage,) = stages(lambda x: x.neg(), torch.randn(3, 64, ENOUGH, 4))
    assert stage.columns() == ENOUGH * 4  # enough, though 64 times as many lie together
    (stage,) = stages(lambda x: x.neg(), torch.randn(3, MOST, ENOUGH // 4))
    assert stage.columns() == ENOUGH // 4  # the next dimension is too long


def test_what_a_column_sum_adds_up_stays_a_row() -> None:
    bias, x = torch.zeros(8, requires_grad=True), torch.randn(3, 4, 8)
    compiled = megafuse.fuse(lambda b, x: torch.tanh(x + b)).build(bias, x)
    assert compiled is not None and compiled.plan.backward is not None
    regions = [r for r in compiled.plan.backward.regions if isinstance(r, RowRegion)]
    sums = [s for r in regions for s in r.stages if any(o.kind == "column" for o in s.roots)]
    assert sums and all(s.columns() == 8 for s in sums)


def test_reductions_choose_their_own_columns() -> None:
    (stage,) = stages(lambda x: (x * 2).sum(-1), IMAGE)
    assert stage.columns() == 16
