"""How composite operators open into what the planner can fuse.

Used while tracing, so that casts and backward come from PyTorch's own autograd: norms, losses and
statistics are opened here exactly as the CUDA kernels compute them (fp32 inside, one rounding at
the end), everything else by PyTorch's decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from megafuse.decompositions.common import compute_dtype, constant
from megafuse.decompositions.indices import nll_loss, nll_loss_backward, tril, triu
from megafuse.decompositions.norms import (
    batch_norm,
    batch_norm_backward,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
)
from megafuse.decompositions.reductions import (
    logsumexp,
    mean,
    safe_softmax,
    std,
    std_mean,
    var,
    var_mean,
    vector_norm,
)

aten = torch.ops.aten


def silu(x: Tensor) -> Tensor:
    xf = x.to(compute_dtype(x.dtype))
    return (xf * torch.sigmoid(xf)).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    xf = x.to(dtype)
    s = torch.sigmoid(xf)
    return (grad.to(dtype) * (s * (xf * (1.0 - s) + 1.0))).to(x.dtype)


Bound = Tensor | float | None


def clamp(x: Tensor, low: Bound = None, high: Bound = None) -> Tensor:
    """Both bounds hand NaN on, as torch.maximum and torch.minimum do."""
    if low is not None:
        x = torch.maximum(x, low if isinstance(low, Tensor) else constant(low, x))
    if high is not None:
        x = torch.minimum(x, high if isinstance(high, Tensor) else constant(high, x))
    return x


def sign(x: Tensor) -> Tensor:
    one = constant(1.0, x)
    return torch.where(x > 0, one, torch.where(x < 0, -one, constant(0.0, x)))


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    fill = value if isinstance(value, Tensor) else constant(value, x)
    return torch.where(mask, fill, x)


def pad(x: Tensor, widths: Sequence[int], value: float = 0.0) -> Tensor:
    """aten.constant_pad_nd: pairs of widths from the last dimension on; negative ones cut."""
    for i in range(len(widths) // 2):
        dim, (low, high) = x.dim() - 1 - i, widths[2 * i : 2 * i + 2]
        if not all(isinstance(w, int) for w in (low, high)):
            return NotImplemented
        x = x.narrow(dim, max(-low, 0), x.shape[dim] - max(-low, 0) - max(-high, 0))
        shape = list(x.shape)
        parts = [x]
        for width, place in ((low, 0), (high, 2)):
            if width > 0:
                shape[dim] = width
                edge = torch.full(shape, value, dtype=x.dtype, device=x.device)
                parts.insert(place, edge)
        x = torch.cat(parts, dim)
    return x


_OURS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: lambda x, low: clamp(x, low),
    aten.clamp_max.default: lambda x, high: clamp(x, None, high),
    aten.sign.default: sign,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.std_mean.correction: std_mean,
    aten.logsumexp.default: logsumexp,
    aten.linalg_vector_norm.default: vector_norm,
    aten._safe_softmax.default: safe_softmax,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.norm.ScalarOpt_dim: lambda x, p, dims, keepdim=False: vector_norm(
        x, 2 if p is None else p, dims, keepdim
    ),
    aten.clamp_min.Tensor: lambda x, low: clamp(x, low),
    aten.clamp_max.Tensor: lambda x, high: clamp(x, None, high),
    aten.constant_pad_nd.default: pad,
    aten.tril.default: tril,
    aten.triu.default: triu,
}

# Opened by PyTorch's own decompositions: each leaves pointwise operators and reductions only.
_TORCH = [
    aten.gelu, aten.gelu_backward, aten.tanh_backward, aten.sigmoid_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.elu,
    aten.elu_backward, aten.hardtanh, aten.hardtanh_backward, aten.hardswish,
    aten.hardswish_backward, aten.hardsigmoid, aten.hardsigmoid_backward, aten.softplus,
    aten.softplus_backward, aten.mish, aten.mish_backward, aten.relu6, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten._softmax, aten._softmax_backward_data, aten._log_softmax,
    aten._log_softmax_backward_data, aten.addcmul, aten.addcdiv, aten.rsub, aten.square, aten.sgn,
    aten.native_dropout_backward, aten.slice_backward, aten.select_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.lerp, aten.t, aten.glu,
    aten.glu_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.huber_loss,
    aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.xlogy, aten.softshrink, aten.hardshrink,
    aten._prelu_kernel, aten._prelu_kernel_backward, aten.celu, aten.logit, aten.logit_backward,
    aten.isinf, aten.nan_to_num, aten.addmv, aten.mv, aten.dot, aten.outer,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle,
]  # fmt: skip


def table() -> dict[Any, Callable[..., Any]]:
    """The decomposition table that capture traces with."""
    return {**get_decompositions(_TORCH), **_OURS}
