"""Operators that compare positions: losses by label and triangles.

Positions are float32 numbers, so that a label's place along a row is one more comparison inside the
row's own walk and neither a gather nor a scatter touches memory. Exact below 2^24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafuse.decompositions.common import compute_dtype, constant

MOST_POSITIONS = 1 << 24
_NONE, _MEAN = 0, 1


def _positions(extent: int, like: Tensor) -> Tensor:
    return torch.arange(extent, dtype=torch.float32, device=like.device)


def _labels(x: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """(x as [n, classes], whether each element is its row's label, which rows count [n, 1])."""
    if x.dim() not in (1, 2) or not isinstance(x.shape[-1], int):
        return None
    classes = x.shape[-1]
    if classes >= MOST_POSITIONS or abs(ignored) >= MOST_POSITIONS:
        return None
    rows = x.reshape(-1, classes)
    label = target.to(torch.float32).reshape(-1, 1)
    return rows, _positions(classes, x) == label, label != float(ignored)


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """aten.nll_loss_forward: (loss, total weight of the rows that count)."""
    found = _labels(x, target, ignored)
    if found is None:
        return NotImplemented
    rows, hit, counts = found
    dtype = compute_dtype(x.dtype)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    hit = torch.logical_and(hit, counts)
    weighted = rows.to(dtype)
    if weight is None:
        share = torch.where(counts, constant(1.0, zero), zero)
    else:
        wide = weight.to(dtype)
        weighted = weighted * wide
        share = torch.where(hit, wide, zero).sum(1, keepdim=True)
    loss = -torch.where(hit, weighted, zero).sum(1)
    if reduction == _NONE and x.dim() == 2:
        return loss.to(x.dtype), x.new_zeros(())
    total, weights = loss.sum(), share.sum()
    if reduction == _MEAN:
        total = total / weights
    return total.to(x.dtype), weights.to(x.dtype)


def nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    found = _labels(x, target, ignored)
    if found is None:
        return NotImplemented
    rows, hit, counts = found
    dtype = compute_dtype(x.dtype)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    share = -grad.to(dtype)
    if reduction == _MEAN:
        share = share / total_weight.to(dtype)
    if share.dim():
        share = share.reshape(-1, 1)
    if weight is not None:
        share = share * weight.to(dtype)
    result = torch.where(torch.logical_and(hit, counts), share, zero)
    return result.to(x.dtype).expand(rows.shape).reshape(x.shape)


def _triangle(x: Tensor, diagonal: int, lower: bool) -> Tensor:
    height, width = x.shape[-2:]
    if not (isinstance(height, int) and isinstance(width, int)):
        return NotImplemented
    if max(height, width) >= MOST_POSITIONS or not (x.is_floating_point() or x.dtype == torch.bool):
        return NotImplemented
    ahead = _positions(width, x) - _positions(height, x).reshape(-1, 1)
    keep = ahead <= float(diagonal) if lower else ahead >= float(diagonal)
    if x.dtype == torch.bool:
        return torch.logical_and(keep, x)
    return torch.where(keep, x, constant(0.0, x))


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return _triangle(x, diagonal, True)


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return _triangle(x, diagonal, False)
