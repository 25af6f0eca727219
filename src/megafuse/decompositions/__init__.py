"""How composite operators open into what the planner can fuse.

Used while tracing, so that casts and backward come from PyTorch's own autograd: norms, losses and
statistics are opened here exactly as the CUDA kernels compute them (fp32 inside, one rounding at
the end), everything else by PyTorch's decompositions.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _check_bias(bias: Tensor, a: Tensor) -> None:
    """PyTorch's kernels refuse a bias of another dtype; on meta tensors it would be promoted."""
    if bias.dtype != a.dtype:
        raise RuntimeError(f"expected bias and product of one dtype, got {bias.dtype}, {a.dtype}")


def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """bias + a @ b; scaled forms (rare) stay whole. PyTorch adds the bias before it rounds a 16-bit
    result: `passes.epilogue` and `passes.whole` put the two together again."""
    _check_bias(bias, a)
    return torch.mm(a, b) + bias if beta == 1 and alpha == 1 else NotImplemented


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    _check_bias(bias, a)
    return torch.bmm(a, b) + bias if beta == 1 and alpha == 1 else NotImplemented


def clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Both bounds hand NaN on, as torch.maximum and torch.minimum do."""
    if low is not None:
        x = torch.maximum(x, constant(low, x))
    if high is not None:
        x = torch.minimum(x, constant(high, x))
    return x


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    fill = value if isinstance(value, Tensor) else constant(value, x)
    return torch.where(mask, fill, x)


_OURS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_batch_norm.default: batch_norm,
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
    aten.var_mean.correction: var_mean,
    aten.std_mean.correction: std_mean,
    aten.logsumexp.default: logsumexp,
    aten.linalg_vector_norm.default: vector_norm,
    aten._safe_softmax.default: safe_softmax,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
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
]  # fmt: skip


def _unless_half(
    decomposition: Callable[..., Any],
) -> Callable[..., Any]:
    def opened(bias: Tensor, a: Tensor, *rest: Any, **scales: Any) -> Any:
        return NotImplemented if a.dtype.itemsize < 4 else decomposition(bias, a, *rest, **scales)

    return opened


def table(exact: bool = False) -> dict[Any, Callable[..., Any]]:
    """The decomposition table that capture traces with. exact: keep 16-bit products and their
    biases together, which eager rounds once."""
    found = {**get_decompositions(_TORCH), **_OURS}
    if exact:
        for op in (aten.addmm.default, aten.baddbmm.default):
            found[op] = _unless_half(found[op])
    return found
