"""Functions whose sizes change from call to call, and small modules, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import agree, fused, reasons
from end_to_end import small_modules
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "over the batch": lambda x: torch.tanh((x - x.mean(0)) / x.std(0)) * 2 / x.shape[0],
    "a root of a size": lambda x: torch.exp(x * x.shape[0] ** -0.5) + 1,
    "half of a size": lambda x: torch.tanh(x[: x.shape[0] // 2]) * 2 + torch.exp(x).sum(),
    "rows in pairs": lambda x: torch.tanh(x.reshape(x.shape[0] // 2, -1)).exp(),
    "a range": lambda x: torch.tanh(x * torch.arange(x.shape[0])[:, None]).exp(),
    "sizes add": lambda x: torch.tanh(torch.cat([x, x * 2, x[:2]])).exp(),
    "batch by batch": lambda x: torch.tanh((x @ x.t()).softmax(-1) @ x) + 1,
    "chunks": lambda x: [torch.tanh(a) * 2 + i for i, a in enumerate(x.chunk(2, -1))],
    "columns": lambda x: sum(torch.tanh(a) * i for i, a in enumerate(x.unbind(1))),
    "masks": lambda x: torch.tanh(x).masked_fill(x > 0.5, 0.0) * 2 + 1,
    "expanded": lambda x: (torch.tanh(x).exp()[:, None].expand(-1, 3, -1), x.sum() * 2),
    "one value in many ways": lambda x: (
        lambda h: (h, h, h.detach(), h.t(), torch.tanh(x) * 2)
    )(torch.tanh(x) * 2),
    "comparisons": lambda x: (torch.tanh(x) * 2 > 0.3, x.exp() * 2 > 1, x.argmax(-1)),
    "written through views": lambda x: (
        lambda h: (h[:, :2].mul_(3), h.t().add_(1), torch.exp(h))[2]
    )(torch.tanh(x) * 2),
    "a loss": lambda x: F.kl_div(
        x.log_softmax(-1), (x.detach() * 2).softmax(-1), reduction="batchmean"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_sizes_share_one_compilation(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [(torch.randn(n, 8, generator=generator).requires_grad_(),) for n in (4, 6, 10)]
    backend = agree(FUNCTIONS[name], *calls, dynamic=True)
    directions = [g.direction for g in backend.report().graphs]
    assert len(directions) == len(set(directions))
    assert not any("Error" in r for r in reasons(backend).values()), reasons(backend)
    assert fused(backend) > 2


@pytest.mark.parametrize("name", small_modules.CASES)
def test_small_modules(name: str) -> None:
    module, args = small_modules.make(name)
    backend = agree(module, tuple(args))
    assert not any("Error" in r for r in reasons(backend).values()), reasons(backend)
