"""Plain Python arguments: never stale, never rebuilt without end."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from parity import agree, compiled_of, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse
from megafuse.errors import FallbackWarning
from megafuse.runtime.plans import MOST_NUMBERS


def scaled(x: Tensor, by: Any = 1.0, *, mode: str = "plain", flag: bool = False) -> Tensor:
    h = torch.tanh(x) * by if mode == "plain" else torch.tanh(x) + by
    return h - 1 if flag else h


def test_values_that_change_are_never_stale() -> None:
    fused = megafuse.fuse(scaled)
    x = draw(4, 6)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((2.0,), {}), ((3.0,), {}), ((), {}), ((2.0,), {"flag": True}), ((2.0,), {"mode": "sum"}),
        ((), {"by": 3.0}), ((2.0,), {}),
    ]  # fmt: skip
    for args, kwargs in calls:
        agree(scaled, x, *args, fused=fused, **kwargs)


def test_types_and_signs_of_numbers_count() -> None:
    def code(x: Tensor, n: Any) -> Tensor:
        return x + (1 if isinstance(n, bool) else 2 if isinstance(n, int) else 3)

    fused = megafuse.fuse(code)
    x = draw(4, 6)
    for n in (1, 1.0, True):
        agree(code, x, n, fused=fused)
    assert count_plans(fused) == 3
    fused = megafuse.fuse(lambda x, z: x.abs() * math.copysign(1.0, z))
    for z in (0.0, -0.0):
        assert torch.equal(fused(x, z), x.abs() * math.copysign(1.0, z))
    nan = megafuse.fuse(lambda x, z: torch.tanh(x) * z)
    for _ in range(3):
        assert nan(x, float("nan")).isnan().all()
    assert count_plans(nan) == 1


@pytest.mark.parametrize("through", ["argument", "attribute"])
def test_a_number_that_keeps_changing(through: str) -> None:
    """Right for ever, built a bounded number of times, and said once, by name."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
            return torch.tanh(x * self.temperature) * by

    module = Annealed()
    fused = megafuse.fuse(module, options=megafuse.Options(executor="reference"))
    x = draw(4, 6)
    name = "temperature" if through == "attribute" else "an argument"
    with pytest.warns(FallbackWarning, match=rf"{name}.*a plain number is part of a plan") as said:
        for k in range(MOST_NUMBERS + 6):
            value = 1.0 + k / 8
            if through == "attribute":
                module.temperature = value
            got = fused(x, value if through == "argument" else 1.0)
            torch.testing.assert_close(got, module(x, value if through == "argument" else 1.0))
    assert len(said) == 1 and count_plans(fused) == MOST_NUMBERS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.temperature = 1.0
        fused(x)  # the first plans are still there


def test_a_tensor_without_dimensions_is_the_way_out() -> None:
    fused = megafuse.fuse(lambda x, by: torch.tanh(x) * by)
    for k in range(12):
        by = torch.tensor(1.0 + k, requires_grad=True)
        agree(fused.original, draw(4, 6), by, fused=fused)
    assert count_plans(fused) == 1


def test_shapes_devices_and_none() -> None:
    def code(x: Tensor, shape: Any, dtype: Any, extra: Tensor | None = None) -> Tensor:
        y = x.reshape(shape).to(dtype) * 2
        return y if extra is None else y + extra

    fused = megafuse.fuse(code)
    for shape, dtype in (((6, 4), torch.float32), ([4, 6], torch.bfloat16), ((24,), torch.float32)):
        agree(code, draw(4, 6), shape, dtype, fused=fused)
    agree(code, draw(4, 6), (4, 6), torch.float32, draw(6, seed=2), fused=fused)
    assert len(compiled_of(fused)) == 4


def test_modules_as_arguments() -> None:
    def code(x: Tensor, layer: nn.Module, *, last: Any = None) -> Tensor:
        return torch.tanh(layer(x)) if last is None else last(layer(x))

    fused = megafuse.fuse(code)
    for seed in (1, 2):
        layer = seeded(lambda: nn.Linear(6, 6), seed)
        agree(code, draw(4, 6), layer, fused=fused)
    agree(code, draw(4, 6), layer, fused=fused, last=nn.ReLU())
