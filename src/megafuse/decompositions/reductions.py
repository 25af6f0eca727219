"""Reductions that are more than one sum: float32 inside, one rounding at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megafuse.decompositions.common import compute_dtype, constant, count


def _dims(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    if isinstance(dims, int):
        dims = [dims]
    return [d % x.dim() for d in dims] if dims else list(range(x.dim()))


def mean(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    where = _dims(x, dims)
    out = dtype or x.dtype
    total = x.to(compute_dtype(out)).sum(where, keepdim=keepdim)
    return (total / count(x, where)).to(out)


def _moments(
    x: Tensor, dims: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """(variance, mean) in the dtype of arithmetic, two-pass; the variance is divided by
    n - correction, which is 1 unless given."""
    where = _dims(x, dims)
    xf = x.to(compute_dtype(x.dtype))
    n = count(x, where)
    middle = xf.sum(where, keepdim=True) / n
    centred = xf - middle
    total = (centred * centred).sum(where, keepdim=keepdim)
    if not keepdim:
        middle = middle.reshape(total.shape)
    return total / (n - (1 if correction is None else correction)), middle


def var(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    return _moments(x, dims, correction, keepdim)[0].to(x.dtype)


def std(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    return torch.sqrt(_moments(x, dims, correction, keepdim)[0]).to(x.dtype)


def var_mean(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    variance, middle = _moments(x, dims, correction, keepdim)
    return variance.to(x.dtype), middle.to(x.dtype)


def std_mean(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    variance, middle = _moments(x, dims, correction, keepdim)
    return torch.sqrt(variance).to(x.dtype), middle.to(x.dtype)


def logsumexp(x: Tensor, dims: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """The largest element is taken out unless it is infinite, as in torch.logsumexp."""
    if not x.is_floating_point():
        return NotImplemented
    where = _dims(x, dims)
    xf = x.to(compute_dtype(x.dtype))
    top = torch.amax(xf, where, keepdim=True)
    top = torch.where(torch.abs(top) == math.inf, constant(0.0, top), top)
    out = torch.log(torch.exp(xf - top).sum(where, keepdim=True)) + top
    if not keepdim:
        out = out.reshape([s for d, s in enumerate(x.shape) if d not in where])
    return out.to(x.dtype)


def vector_norm(
    x: Tensor, order: float = 2, dims: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The norms of order 1, 2 and infinity; others stay whole."""
    if x.dtype.is_complex or order not in (1, 2, math.inf):
        return NotImplemented
    where, out = _dims(x, dims), dtype or x.dtype
    xf = x.to(compute_dtype(out))
    if order == math.inf:
        return torch.amax(torch.abs(xf), where, keepdim=keepdim).to(out)
    if order == 1:
        return torch.abs(xf).sum(where, keepdim=keepdim).to(out)
    return torch.sqrt((xf * xf).sum(where, keepdim=keepdim)).to(out)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax whose rows of nothing but -inf are zero."""
    out = torch.softmax(x, dim, dtype=dtype)
    empty = torch.amax(x, [dim], keepdim=True) == -math.inf
    return torch.where(empty, constant(0.0, out), out)
