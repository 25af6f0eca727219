"""Normalisations and their backward, as the CUDA kernels compute them: statistics in float32 from
two passes, one rounding at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafuse.decompositions.common import compute_dtype, count


def _inner_dims(x: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """aten.native_layer_norm: two-pass statistics in fp32 (Ba et al., arXiv:1607.06450, eq. 4)."""
    dims, dtype = _inner_dims(x, shape), compute_dtype(x.dtype)
    xf = x.to(dtype)
    n = count(x, dims)
    mean = xf.sum(dims, keepdim=True) / n
    centred = xf - mean
    rstd = torch.rsqrt((centred * centred).sum(dims, keepdim=True) / n + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """native_layer_norm_backward: dx = rstd (g - mean(g) - xhat mean(g xhat)), g = grad weight."""
    dims, dtype = _inner_dims(x, shape), compute_dtype(x.dtype)
    outer = list(range(x.dim() - len(shape)))
    n = count(x, dims)
    gradf = grad.to(dtype)
    xhat = (x.to(dtype) - mean) * rstd
    dx = dw = db = None
    if mask[0]:
        g = gradf * weight.to(dtype) if weight is not None else gradf
        c1 = g.sum(dims, keepdim=True) / n
        c2 = (g * xhat).sum(dims, keepdim=True) / n
        # Two fused multiply-adds an element, and one rounding of the large term instead of three.
        dx = (g * rstd - (xhat * (c2 * rstd) + c1 * rstd)).to(x.dtype)
    if mask[1] and weight is not None:
        dw = gradf * xhat
        dw = (dw.sum(outer) if outer else dw).to(weight.dtype)
    if mask[2] and bias is not None:
        db = gradf.sum(outer).to(bias.dtype) if outer else gradf.to(bias.dtype)
    return dx, dw, db


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten.native_group_norm; mean and rstd [n, groups] stay in float32."""
    dtype = compute_dtype(x.dtype)
    xf = x.reshape(n, groups, c // groups, inner).to(dtype)
    size = (c // groups) * inner
    mean = xf.sum((2, 3), keepdim=True) / size
    centred = xf - mean
    rstd = torch.rsqrt((centred * centred).sum((2, 3), keepdim=True) / size + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to(dtype).reshape(1, groups, c // groups, 1)
    if bias is not None:
        y = y + bias.to(dtype).reshape(1, groups, c // groups, 1)
    return y.to(x.dtype).reshape(x.shape), mean.reshape(n, groups), rstd.reshape(n, groups)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    inner: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """native_group_norm_backward, as layer norm's with each channel's sums taken once: the sums of
    a group and the gradients of weight and bias are both made of them."""
    dtype = compute_dtype(x.dtype)
    shape = (n, groups, c // groups, inner)
    gradf = grad.reshape(shape).to(dtype)
    mean, rstd = (s.to(dtype).reshape(n, groups, 1, 1) for s in (mean, rstd))
    xhat = (x.reshape(shape).to(dtype) - mean) * rstd
    along, plain = (gradf * xhat).sum(3, keepdim=True), gradf.sum(3, keepdim=True)
    dx = dw = db = None
    if mask[0]:
        size = (c // groups) * inner
        w = None if weight is None else weight.to(dtype).reshape(1, groups, c // groups, 1)
        c1 = (plain if w is None else plain * w).sum(2, keepdim=True) / size
        c2 = (along if w is None else along * w).sum(2, keepdim=True) / size
        g = gradf if w is None else gradf * w
        dx = (g * rstd - (xhat * (c2 * rstd) + c1 * rstd)).to(x.dtype).reshape(x.shape)
    if mask[1] and weight is not None:
        dw = along.sum(0).reshape(c).to(weight.dtype)
    if mask[2]:
        db = plain.sum(0).reshape(c).to(x.dtype if weight is None else weight.dtype)
    return dx, dw, db


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    """[channels] against x [n, channels, ...], in the dtype of arithmetic."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    return value.to(compute_dtype(x.dtype)).reshape(shape)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten.native_batch_norm: in eval an affine map by channel; in training two-pass statistics of
    all extents but the channels, and the running ones are written (with the unbiased variance)."""
    xf = x.to(compute_dtype(x.dtype))
    if training:
        others = [0, *range(2, x.dim())]
        size = count(x, others)
        mean = xf.sum(others, keepdim=True) / size
        centred = xf - mean
        variance = (centred * centred).sum(others, keepdim=True) / size
        rstd = torch.rsqrt(variance + eps)
        saved = mean.reshape(-1), rstd.reshape(-1)
        for running, now in ((running_mean, mean), (running_var, variance * (size / (size - 1)))):
            if running is not None:
                running.copy_(momentum * now.reshape(-1) + (1 - momentum) * running)
    elif running_mean is None or running_var is None:
        return NotImplemented
    else:
        centred = xf - _by_channel(running_mean, x)
        rstd = torch.rsqrt(_by_channel(running_var, x) + eps)
        saved = x.new_empty((0,)), x.new_empty((0,))
    y = centred * rstd
    if weight is not None:
        y = y * _by_channel(weight, x)
    if bias is not None:
        y = y + _by_channel(bias, x)
    return y.to(x.dtype), *saved


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if train:
        if save_mean is None or save_rstd is None:
            return NotImplemented
        mean, rstd = _by_channel(save_mean, x), _by_channel(save_rstd, x)
    elif running_mean is None or running_var is None:
        return NotImplemented
    else:
        mean = _by_channel(running_mean, x)
        rstd = torch.rsqrt(_by_channel(running_var, x) + eps)
    others = [0, *range(2, x.dim())]
    gradf, xhat = grad.to(rstd.dtype), (x.to(rstd.dtype) - mean) * rstd
    along = (gradf * xhat).sum(others, keepdim=True)
    plain = gradf.sum(others, keepdim=True)
    dx = dw = db = None
    if mask[0]:
        scale = rstd if weight is None else rstd * _by_channel(weight, x)
        dx = gradf * scale
        if train:
            size = count(x, others)
            dx = dx - (xhat * (along / size) + plain / size) * scale
        dx = dx.to(x.dtype)
    if mask[1] and weight is not None:
        dw = along.reshape(-1).to(weight.dtype)
    if mask[2]:
        db = plain.reshape(-1).to(x.dtype if weight is None else weight.dtype)
    return dx, dw, db
