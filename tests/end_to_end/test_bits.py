"""Views that read the same bytes as another dtype are no reshapes."""

from __future__ import annotations

import torch
from support import plan_of

import megafuse


def test_bits_of_another_dtype() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).view(torch.bfloat16) * 3

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).half()
    eager = torch.nan_to_num(f(x))
    assert torch.equal(torch.nan_to_num(megafuse.fuse(f)(x)), eager) and eager.any()
    targets = [n.attrs["target"] for n in plan_of(f, x).joint.nodes if n.op == "extern"]
    assert targets == ["aten.view.dtype"]
