"""Autograd around a fused module: what is asked for, when, and what was overwritten meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import agree, compiled_of, draw, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megafuse
from megafuse import FusedModule
from megafuse.errors import DoubleBackwardError


@pytest.fixture(scope="module")
def pair() -> tuple[FusedModule, nn.Module]:
    net = seeded()
    return megafuse.fuse(net), copy.deepcopy(net)


def clear(*modules: nn.Module) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def same_grads(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


STEPS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "accumulation": lambda m, x: [m(x * k).square().mean().backward() for k in (1, 2, 3)],
    "several forwards": lambda m, x: sum(m(x * k).sum() for k in (1, 2, 3)).backward(),
    "backwards in another order": lambda m, x: [
        o.backward() for o in reversed([m(x * k).sum() for k in (1, 2, 3)])
    ],
    "retained": lambda m, x: (lambda y: [y.backward(retain_graph=True), y.backward()])(m(x).sum()),
    "itself twice": lambda m, x: m(m(x)).square().sum().backward(),
    "beside eager code": lambda m, x: (m(x).exp() @ m(x).t()).mean().backward(),
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False).square().sum().backward(),
    "checkpoint, reentrant": lambda m, x: checkpoint(m, x * 1.0, use_reentrant=True).sum()
    .backward(),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_a_step(pair: tuple[FusedModule, nn.Module], name: str) -> None:
    fused, eager = pair
    clear(fused, eager)
    grads = []
    for module in (fused, eager):
        x = draw(5, 6)
        STEPS[name](module, x)
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    same_grads(fused, eager)


@pytest.mark.parametrize("frozen", ["lin", "norm", "all", "input"])
def test_frozen(frozen: str) -> None:
    """Gradients of what is frozen are neither computed nor allocated."""
    net = seeded()
    for name, p in net.named_parameters():
        p.requires_grad_(not (frozen == "all" or name.startswith(frozen)))
    x = draw(5, 6, grad=frozen != "input")
    fused = agree(net, x)
    (compiled,) = compiled_of(fused)
    assert compiled.plan.backward is not None
    outputs = compiled.plan.split.backward.outputs
    wants = [p.requires_grad for p in net.parameters()] + [False, x.requires_grad]
    assert [g is not None for g in outputs] == wants
    written = {n for r in compiled.plan.backward.regions for n in r.writes()}
    assert (
        not any(n.type.shape == net.lin.weight.shape for n in written)
        or net.lin.weight.requires_grad
    )


def test_nothing_wants_a_gradient() -> None:
    net = seeded().requires_grad_(False)
    fused = agree(net, draw(5, 6, grad=False))
    assert compiled_of(fused)[0].plan.backward is None
    assert fused(draw(5, 6, grad=False)).grad_fn is None


def test_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.down.weight = self.up.weight
            self.norms = nn.ModuleList([nn.LayerNorm(6)] * 2)

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = x + self.down(torch.tanh(self.up(norm(x))))
            return x

    agree(seeded(Tied), draw(4, 6))


def test_several_outputs_of_which_some_are_used() -> None:
    def code(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(x * w)
        return h, h.sum(-1), (x > 0), w * 2, x.detach() * 3

    fused = megafuse.fuse(code)
    for used in ((0,), (1,), (0, 1), (3,), (1, 3)):
        x, w = draw(4, 6), draw(6, seed=2)
        got, want = (
            torch.autograd.grad(sum(f(x, w)[i].square().sum() for i in used), [x, w],
                                allow_unused=True)
            for f in (fused, code)
        )  # fmt: skip
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_in_place_operators_on_intermediates() -> None:
    def code(x: Tensor) -> Tensor:
        h = x * 2
        h.add_(1).mul_(x)
        h[:, 1:3] = 0.5
        h[0] += 3
        return h.relu_() * (x * 1).clamp_(0.3, 0.6)

    agree(code, draw(4, 6))


# -- what the caller overwrites between forward and backward


def test_an_output_nobody_needs_may_be_overwritten() -> None:
    for code in (lambda x: (x * 2).reshape(-1), lambda x: (x * 3).t(), lambda x: x.exp() * x):
        fused = megafuse.fuse(code)
        grads = []
        for f in (fused, code):
            x = draw(4, 6)
            out = f(x)
            out.mul_(2).relu_()
            grads.append(torch.autograd.grad(out.sum(), x)[0])
        torch.testing.assert_close(*grads)


class Products(nn.Module):
    """Its first result is an operand of its second, so backward needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.tanh() @ self.w
        return h, h @ self.w


def test_overwriting_an_output_that_backward_needs_is_noticed() -> None:
    module = seeded(Products)
    for f in (module, megafuse.fuse(module)):
        h, out = f(draw(4, 6))
        with torch.no_grad():
            h.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_parameter_that_backward_does_not_need_may_change() -> None:
    """Only what backward reads is held: an optimizer may step before it."""
    grads = []
    for make in (lambda m: m, megafuse.fuse):
        lin = seeded(lambda: nn.Linear(6, 6))
        x = draw(4, 6, grad=False)
        out = make(lin)(x)
        with torch.no_grad():
            lin.weight.add_(1)
            lin.bias.add_(1)
        out.sum().backward()
        grads.append([lin.weight.grad, lin.bias.grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_that_backward_needs_must_not_change() -> None:
    module = seeded(Products)
    for f in (module, megafuse.fuse(module)):
        _, out = f(draw(4, 6))
        with torch.no_grad():
            module.w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_second_derivatives_are_refused_by_name_and_left_to_the_original() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    with pytest.raises(DoubleBackwardError, match=r"fused\.original"):
        torch.autograd.grad(fused(x).square().sum(), x, create_graph=True)
    (g,) = torch.autograd.grad(fused.original(x).square().sum(), x, create_graph=True)
    assert g.requires_grad


def test_hooks_on_tensors_and_parameters() -> None:
    seen: dict[str, dict[str, Tensor]] = {"fused": {}, "eager": {}}
    for name, make in (("fused", megafuse.fuse), ("eager", lambda m: m)):
        net = seeded()
        net.lin.weight.register_hook(lambda g, s=seen[name]: s.update(weight=g))
        net.lin.bias.register_post_accumulate_grad_hook(
            lambda p, s=seen[name]: s.update(bias=p.grad.clone())
        )
        x = draw(4, 6)
        out = make(net)(x)
        out.register_hook(lambda g: g * 2)
        out.retain_grad()
        out.sum().backward()
        seen[name] |= {"out": out.grad, "x": x.grad}
    assert len(seen["fused"]) == 4
    torch.testing.assert_close(seen["fused"], seen["eager"], rtol=1e-4, atol=1e-5)


def test_saved_tensors_hooks_see_what_is_saved() -> None:
    module = seeded(Products)
    packed: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(tuple(t.shape))
        return t.clone()

    fused = megafuse.fuse(module)
    x = draw(4, 6)
    want = torch.autograd.grad(fused(x)[1].sum(), x)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fused(x)[1]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)
    assert packed.count((6, 6)) == 1 and len(packed) >= 3  # the weight, the input, h


def test_gradients_of_a_sum_do_not_share_memory() -> None:
    fused = megafuse.fuse(lambda x, y: x + y)
    x, y, upstream = draw(4, 6), draw(4, 6, seed=2), draw(4, 6, seed=3, grad=False)
    kept = upstream.clone()
    fused(x, y).backward(upstream)
    assert x.grad is not None and y.grad is not None
    x.grad.zero_()
    assert torch.equal(y.grad, kept) and torch.equal(upstream, kept)
