"""Models trained through torch.compile(backend="megafuse") follow eager's loss curve."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import Recommender, Transformer, assert_inside_spread, compare

import megafuse


@pytest.mark.parametrize("kind", [Transformer, Recommender])
def test_losses_are_inside_the_spread_of_eager_runs(kind: type[nn.Module]) -> None:
    backend = megafuse.Backend()
    compare(kind, backend)
    report = backend.report()
    assert [g.direction for g in report.graphs] == ["forward", "backward"]
    assert all(g.parts and g.row_regions > 4 for g in report.graphs)


def test_the_spread_notices_a_wrong_curve() -> None:
    eager = torch.linspace(4, 3, 50) + torch.arange(5).reshape(5, 1) * 3e-7
    assert_inside_spread(eager[1] + 2e-7, eager)
    with pytest.raises(AssertionError, match="times the spread"):
        assert_inside_spread(eager[1] + 1e-5, eager)
