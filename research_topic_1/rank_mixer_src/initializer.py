"""The he-uniform initializer shared by the dense weights and biases."""

import math
from collections.abc import Sequence

import torch


def he_uniform_bound(shape: Sequence[int]) -> float:
    """Return sqrt(6 / fan_in) with fan_in = product(shape[:-1]); a 1-D shape has fan_in 1."""
    return math.sqrt(6.0 / math.prod(shape[:-1]))


def he_uniform(
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.nn.Parameter:
    """Draw a parameter of `shape`, uniform in [-bound, bound] with bound = he_uniform_bound(shape).

    The draw uses the process-wide generator of `device` and happens in `dtype` itself, so a 16-bit
    value may be the bound rounded to that dtype.
    """
    bound = he_uniform_bound(shape)
    values = torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.nn.Parameter(values.uniform_(-bound, bound))
