"""The matrix-product backends of the dense FFN: `bmm` and `grouped`."""

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

Gemm = Callable[[Tensor, Tensor], Tensor]


@overload
def grouped_gemm(groups: Tensor, weights: Tensor) -> Tensor: ...
@overload
def grouped_gemm(groups: Sequence[Tensor], weights: Tensor) -> list[Tensor]: ...


def grouped_gemm(groups: Tensor | Sequence[Tensor], weights: Tensor) -> Tensor | list[Tensor]:
    """Multiply every group of rows by its own weight: groups[g] @ weights[g].

    `weights` is [G,K,N]. `groups` is either

    - one tensor [G,M,K], equal-size groups already stacked; the result is [G,M,N], or
    - a sequence of G tensors [M_g,K], M_g >= 0; the result is a list of G tensors [M_g,N].

    Equal-size groups go through one torch.bmm, variable-size groups through one torch.matmul each;
    both are differentiable in rows and weights. All dtypes must agree, as PyTorch requires.

    Raises ValueError when the number of groups and of weights differ.
    """
    if len(groups) != len(weights):
        raise ValueError(f"one weight a group is needed: got {len(weights)} and {len(groups)}")
    if isinstance(groups, Tensor):
        return torch.bmm(groups, weights)
    if len({group.shape[0] for group in groups}) == 1:
        return list(torch.bmm(torch.stack(list(groups)), weights).unbind(0))
    return [torch.matmul(group, weight) for group, weight in zip(groups, weights, strict=True)]


# Each maps ([T,M,K], [T,K,N]) to [T,M,N]. At EP=1 every token owns B rows, so dense groups are
# always equal in size and both backends end in the same torch.bmm.
GEMM_BACKENDS: dict[str, Gemm] = {"bmm": torch.bmm, "grouped": grouped_gemm}

BACKEND_NOTES = {
    "bmm": "one torch.bmm over the token axis",
    "grouped": "torch.bmm on equal-size groups, torch.matmul on variable-size groups",
}
