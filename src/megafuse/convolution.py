"""Convolutions over [batch, height, width, channels] tensors, as cuDNN's fast kernels want them.

Operators of our own, like attention's, so that a channels-last tensor is an ordinary contiguous one
to the graph: PyTorch sees it as [batch, channels, height, width] with channels-last strides, and
its results, which it lays out alike, come back without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""The permutations that put channels last, and back second."""

_HOW = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,"
    " SymInt[] output_padding, SymInt groups"
)
_LIBRARY = torch.library.Library("megafuse", "FRAGMENT")
_LIBRARY.define(f"convolution(Tensor x, Tensor weight, Tensor? bias, {_HOW}) -> Tensor")
_LIBRARY.define(
    f"convolution_backward(Tensor grad, Tensor x, Tensor weight, SymInt[]? bias_sizes, {_HOW},"
    " bool[] mask) -> (Tensor, Tensor, Tensor)"
)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """x and the result with channels last, weight as PyTorch keeps it; the rest as aten's."""
    y = aten.convolution(x.permute(FIRST), weight, bias, *how)
    return y.permute(LAST).contiguous()  # type: ignore[no-any-return]


def _convolution_backward(
    grad: Tensor, x: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (channels last), weight and bias; empty where the mask asks for none."""
    grads = aten.convolution_backward(grad.permute(FIRST), x.permute(FIRST), *how)
    dx, dw, db = (grad.new_empty(0) if g is None else g for g in grads)
    if how[-1][0]:
        dx = dx.permute(LAST)
    return dx.contiguous(), dw.contiguous(), db.contiguous()


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("convolution", _convolution, _key)
    _LIBRARY.impl("convolution_backward", _convolution_backward, _key)
