"""Fuel limits how many merges happen: a tool to find the merge that broke something."""

from __future__ import annotations

import pytest
import torch
from support import assert_close_to_float64, kinds, plan_of, with_options
from torch import Tensor, nn

from megafuse import Options


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x)) + x


def regions(fuel: int | None) -> int:
    x = torch.randn(5, 12, requires_grad=True)
    forward, backward = kinds(plan_of(Net(), x, options=with_options(fuel=fuel)))
    return len(forward) + len(backward)


def test_fuel_limits_merges() -> None:
    counts = [regions(fuel) for fuel in (0, 1, 2, 3, None)]
    assert counts[-1] == 2
    assert counts[0] > counts[1] > counts[2] > 2 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("fuel", [0, 2])
def test_with_little_fuel_results_are_right(fuel: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 12, requires_grad=True)
    assert_close_to_float64(Net(), [x], options=with_options(fuel=fuel))


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().fuel is None
    monkeypatch.setenv("MEGAFUSE_FUEL", "3")
    assert Options().fuel == 3
    x = torch.randn(5, 12, requires_grad=True)
    limited = kinds(plan_of(Net(), x))
    monkeypatch.setenv("MEGAFUSE_FUEL", "")
    assert limited != kinds(plan_of(Net(), x))


def test_unknown_option_values_are_refused() -> None:
    for name in ("rounding", "memory", "executor"):
        with pytest.raises(ValueError, match=f"Options.{name} must be one of"):
            Options(**{name: "fast"})
