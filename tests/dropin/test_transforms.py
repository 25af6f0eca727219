"""torch.func and forward-mode differentiation: PyTorch's own results, and one notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from parity import agree, draw, seeded
from torch import Tensor

import megafuse
from megafuse.errors import FallbackWarning


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[:, None]),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(4, 6)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "per-sample gradients": lambda f, x: torch.func.vmap(
        torch.func.grad(lambda x: f(x).sum())
    )(x[:, None]),
    "dual numbers": dual,
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6, grad=False)
    agree(net, x, fused=fused)
    with pytest.warns(FallbackWarning, match="transform|forward-mode") as said:
        got = TRANSFORMS[name](fused, x)
    assert len([w for w in said if w.category is FallbackWarning]) == 1
    torch.testing.assert_close(got, TRANSFORMS[name](net, x), rtol=1e-5, atol=1e-6)
    agree(net, x, fused=fused)


def test_functional_call() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    agree(net, x, fused=fused)
    other = {n: p.detach() * 2 for n, p in net.named_parameters()}
    got, want = (torch.func.functional_call(m, other, (x,)) for m in (fused, net))
    torch.testing.assert_close(got, want)
    agree(net, x, fused=fused)


def test_autograd_functional_and_gradcheck_need_the_original() -> None:
    net = seeded().double()
    fused = megafuse.fuse(net)
    x = draw(3, 6, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match="float64"):
        assert torch.autograd.gradcheck(fused, (x,))
        assert torch.autograd.gradgradcheck(fused, (x,))
