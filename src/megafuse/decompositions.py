"""How composite operators open into what the planner can fuse.

Used while tracing, so that casts and backward come from PyTorch's own autograd: the forward and the
backward of layer norm and silu are opened here exactly as the CUDA kernels compute them (fp32
inside, one rounding at the end), everything else by PyTorch's decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inner_dims(x: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


def _count(x: Tensor, dims: Sequence[int]) -> Any:
    count = 1
    for d in dims:
        count = count * x.shape[d]
    return count


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """aten.native_layer_norm: two-pass statistics in fp32 (Ba et al., arXiv:1607.06450, eq. 4)."""
    dims, dtype = _inner_dims(x, shape), _compute_dtype(x.dtype)
    xf = x.to(dtype)
    n = _count(x, dims)
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
    dims, dtype = _inner_dims(x, shape), _compute_dtype(x.dtype)
    outer = list(range(x.dim() - len(shape)))
    n = _count(x, dims)
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


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """aten.native_batch_norm in training: two-pass statistics over all extents but the channels,
    in fp32; writes the running ones (their variance is the unbiased one). Evaluation stays whole.
    """
    if not training:
        return NotImplemented
    dtype, dims = _compute_dtype(x.dtype), [d for d in range(x.dim()) if d != 1]
    n = _count(x, dims)
    xf = x.to(dtype)
    mean = xf.sum(dims, keepdim=True) / n
    centred = xf - mean
    var = (centred * centred).sum(dims, keepdim=True) / n
    rstd = torch.rsqrt(var + eps)
    y = centred * rstd
    if weight is not None:
        y = y * _channels(weight, x).to(dtype)
    if bias is not None:
        y = y + _channels(bias, x).to(dtype)
    for running, now in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
        if running is not None:
            running.copy_(momentum * now.reshape(-1) + (1 - momentum) * running)
    return y.to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, mean: Tensor | None, rstd: Tensor | None, training: bool,
    eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    if not training or mean is None or rstd is None:
        return NotImplemented
    dtype, dims = _compute_dtype(x.dtype), [d for d in range(x.dim()) if d != 1]
    n = _count(x, dims)
    gradf, rstd = grad.to(dtype), _channels(rstd, x)
    xhat = (x.to(dtype) - _channels(mean, x)) * rstd
    total, along = gradf.sum(dims, keepdim=True), (gradf * xhat).sum(dims, keepdim=True)
    dx = gradf - total / n - xhat * (along / n)
    dx = dx * (rstd if weight is None else rstd * _channels(weight, x).to(dtype))
    like = x.dtype if weight is None else weight.dtype
    return (dx.to(x.dtype) if mask[0] else None,
            along.reshape(-1).to(like) if mask[1] else None,
            total.reshape(-1).to(like) if mask[2] else None)  # fmt: skip


def _channels(v: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, as `x` broadcasts it."""
    return v.reshape([1, -1, *[1] * (x.dim() - 2)])


def silu(x: Tensor) -> Tensor:
    xf = x.to(_compute_dtype(x.dtype))
    return (xf * torch.sigmoid(xf)).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    dtype = _compute_dtype(x.dtype)
    xf = x.to(dtype)
    s = torch.sigmoid(xf)
    return (grad.to(dtype) * (s * (xf * (1.0 - s) + 1.0))).to(x.dtype)


def _check_bias(bias: Tensor, a: Tensor) -> None:
    """PyTorch's kernels refuse a bias of another dtype; on meta tensors it would be promoted."""
    if bias.dtype != a.dtype:
        raise RuntimeError(f"expected bias and product of one dtype, got {bias.dtype}, {a.dtype}")


def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """bias + a @ b. Scaled forms (rare) stay whole, and so do 16-bit ones: PyTorch adds the bias
    before it rounds, a product in memory is rounded first. In float32 that is below notice."""
    _check_bias(bias, a)
    if beta != 1 or alpha != 1 or a.dtype.itemsize < 4:
        return NotImplemented
    return torch.mm(a, b) + bias


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    _check_bias(bias, a)
    if beta != 1 or alpha != 1 or a.dtype.itemsize < 4:
        return NotImplemented
    return torch.bmm(a, b) + bias


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Both bounds hand NaN on, as torch.maximum and torch.minimum do."""
    if low is not None:
        x = torch.maximum(x, _constant(low, x))
    if high is not None:
        x = torch.minimum(x, _constant(high, x))
    return x


def mean(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    where = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    out = dtype or x.dtype
    total = x.to(_compute_dtype(out)).sum(where, keepdim=keepdim)
    return (total / _count(x, where)).to(out)


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    fill = value if isinstance(value, Tensor) else _constant(value, x)
    return torch.where(mask, fill, x)


def var(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    """Two-pass variance in fp32; divides by max(0, n - correction) as torch.var does."""
    where = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    xf = x.to(_compute_dtype(x.dtype))
    n = _count(x, where)
    centred = xf - xf.sum(where, keepdim=True) / n
    total = (centred * centred).sum(where, keepdim=keepdim)
    return (total / (n - (1 if correction is None else correction))).to(x.dtype)


def std(
    x: Tensor, dims: Sequence[int] | None = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    return torch.sqrt(var(x.to(_compute_dtype(x.dtype)), dims, correction=correction,
                          keepdim=keepdim)).to(x.dtype)  # fmt: skip


_OURS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.clamp.default: clamp,
    aten.clamp_min.default: lambda x, low: clamp(x, low),
    aten.clamp_max.default: lambda x, high: clamp(x, None, high),
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.var.correction: var,
    aten.std.correction: std,
}

# Opened by PyTorch's own decompositions: each leaves pointwise operators and reductions only.
_TORCH = [
    aten.gelu, aten.gelu_backward, aten.tanh_backward, aten.sigmoid_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.elu,
    aten.elu_backward, aten.hardtanh, aten.hardtanh_backward, aten.hardswish,
    aten.hardswish_backward, aten.hardsigmoid, aten.hardsigmoid_backward, aten.softplus,
    aten.softplus_backward, aten.mish, aten.mish_backward, aten.relu6, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten._softmax, aten._softmax_backward_data, aten._log_softmax,
    aten._log_softmax_backward_data, aten.native_group_norm, aten.native_group_norm_backward,
    aten.addcmul, aten.addcdiv, aten.rsub,
    aten.square, aten.sgn,
    aten.native_dropout_backward, aten.slice_backward, aten.select_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.nll_loss_forward, aten.nll_loss_backward, aten.lerp,
    aten.stack, aten.unbind, aten.t, aten.glu, aten.glu_backward,
]  # fmt: skip


def table() -> dict[Any, Callable[..., Any]]:
    """The decomposition table that capture traces with."""
    available = get_decompositions([op for op in _TORCH if op is not None])
    return {**available, **_OURS}
