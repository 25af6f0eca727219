"""What decompositions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic inside an operator runs in, as in PyTorch's CUDA kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count(x: Tensor, dims: Sequence[int]) -> Any:
    """Elements of `x` along `dims`; a run-time size stays one."""
    total = 1
    for d in dims:
        total = total * x.shape[d]
    return total


def constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)
