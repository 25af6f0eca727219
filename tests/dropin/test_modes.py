"""Modes of the module and of PyTorch: train, eval, no_grad, inference, autocast, hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from parity import agree, compiled_of, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse
from megafuse import FusedModule
from megafuse.errors import FallbackWarning, UnsupportedError


def test_dropout_follows_train_and_eval() -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6)))
    fused = megafuse.fuse(net)
    assert fused.training
    x = draw(64, 6)
    for mode in (False, True, False):
        assert fused.train(mode) is fused
        assert net.training == net[1].training == mode
        if mode:
            assert not torch.equal(fused(x), fused(x))
        else:
            agree(net, x, fused=fused)
    net.train()  # from the other side
    assert fused[1] is net[1] and len(fused) == 3 and list(fused) == list(net)
    assert not torch.equal(fused(x), fused(x))


def test_dropout_is_drawn_from_pytorchs_generator() -> None:
    fused = megafuse.fuse(lambda x: torch.dropout(x, 0.5, True) * 2)
    x = torch.ones(200, 6, requires_grad=True)
    torch.manual_seed(3)
    first, second = fused(x), fused(x)
    torch.manual_seed(3)
    assert torch.equal(fused(x), first) and not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 4.0}
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad, first)  # backward drops what forward dropped


def test_no_grad_and_inference_mode() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    contexts: list[Callable[[], AbstractContextManager[Any]]] = [
        torch.no_grad, torch.inference_mode, torch.enable_grad,
    ]  # fmt: skip
    for context in contexts:
        with context():
            got, want = fused(x), net(x)
        torch.testing.assert_close(got, want)
        assert got.requires_grad == want.requires_grad
        assert got.is_inference() == want.is_inference()
    with torch.inference_mode():
        held = draw(4, 6, grad=False) * 1.0
    with torch.no_grad():
        torch.testing.assert_close(fused(held), net(held))


def test_autocast_around_the_call_is_eagers_and_said_once() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(FallbackWarning, match="autocast") as said:
            got = [fused(x), fused(x)]
        want = net(x)
        with torch.autocast("cpu", enabled=False):
            agree(net, x, fused=fused)
    assert len(said) == 1
    assert all(torch.equal(g, want) and g.dtype == want.dtype for g in got)
    wanted = list(net.parameters())
    pairs = zip(*(torch.autograd.grad(o.sum(), wanted) for o in (got[0], want)), strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)


def test_autocast_inside_the_code_is_refused_by_line() -> None:
    def code(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    with pytest.raises(UnsupportedError, match=r"test_modes\.py:\d+: .*autocast"):
        megafuse.fuse(code, draw(4, 6), draw(6, 6))

    def switched_off(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x @ w)

    agree(switched_off, draw(4, 6), draw(6, 6))


HOOKS: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "forward": lambda m, f: m.register_forward_hook(lambda m, i, o: f(o)),
    "forward pre": lambda m, f: m.register_forward_pre_hook(lambda m, i: f(i[0])),
    "backward": lambda m, f: m.register_full_backward_hook(lambda m, i, o: f(o[0])),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", ["the original", "norm"])
def test_hooks_see_every_call(kind: str, place: str) -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    agree(net, x, fused=fused)
    seen: list[Tensor] = []
    handle = HOOKS[kind](net if place == "the original" else net.norm, lambda t: seen.append(t))
    with pytest.warns(FallbackWarning, match="norm" if place == "norm" else "the module itself"):
        fused(x).sum().backward()
        fused(x).sum().backward()
    assert len(seen) == 2 and all(type(t) is Tensor for t in seen)
    handle.remove()
    plans = count_plans(fused)
    agree(net, x, fused=fused)
    assert len(seen) == 2 and count_plans(fused) == plans


def test_hooks_on_the_fused_module_itself_do_not_stop_it() -> None:
    results = []
    for make in (megafuse.fuse, lambda m: m):
        module, seen = make(seeded()), list[Tensor]()
        module.register_forward_hook(lambda m, i, o: o * 2)
        module.register_full_backward_hook(lambda m, i, o, seen=seen: seen.extend((*i, *o)))
        x = draw(4, 6)
        out = module(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *seen])
        if isinstance(module, FusedModule):
            assert len(compiled_of(module)) == 1
    assert len(results[0]) == 4
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_modes_that_watch_operators_see_eagers() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net = seeded()
    fused = megafuse.fuse(net)
    counts = []
    for module in (fused, net):
        with FlopCounterMode(display=False) as counter:
            module(draw(4, 6)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_fused_module_inside_another() -> None:
    inner = megafuse.fuse(seeded())
    outer = nn.Sequential(inner, nn.LayerNorm(6))
    agree(outer, draw(4, 6))
    inner.lin.register_forward_hook(lambda m, i, o: o * 0)
    with pytest.warns(FallbackWarning, match=r"0\.lin"):
        fused = megafuse.fuse(outer, draw(4, 6))
    assert torch.equal(fused(draw(4, 6)), outer(draw(4, 6)))


def test_a_compiler_around_it_sees_pytorch_operators() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    whole = torch.compile(lambda x: fused(x) * 2, backend="eager", fullgraph=True)
    x = draw(4, 6)
    torch.testing.assert_close(whole(x), net(x) * 2)
    exported = torch.export.export(fused, (x.detach(),))
    torch.testing.assert_close(exported.module()(x.detach()), net(x))
