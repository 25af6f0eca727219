"""Gradients of slices that end at a run-time size."""

from __future__ import annotations

import torch

import megafuse


def test_slices_with_an_open_end_overlap() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x[3:].t() @ (x[3:] * 2 + 1)).exp() + torch.tanh(x[:2] * 3).sum()

    fused = megafuse.fuse(f)
    for rows in (6, 9):
        generator = torch.Generator().manual_seed(rows)
        x = (torch.randn(rows, 8, generator=generator) / 4).requires_grad_()
        (got,) = torch.autograd.grad(fused(x).sum(), x)
        (want,) = torch.autograd.grad(f(x).sum(), x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
