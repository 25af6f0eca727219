"""Parameters and buffers: swapped, moved, assigned, optimized, written by the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import agree, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse
from megafuse.errors import UnsupportedError


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_ten_steps_of_training(optimizer: str) -> None:
    losses = []
    for make in (megafuse.fuse, lambda m: m):
        net = make(seeded())
        opt = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
        run = []
        for k in range(10):
            opt.zero_grad()
            loss = (net(draw(5 + k % 2, 6, seed=k)) - 1).square().mean()
            loss.backward()
            opt.step()
            run.append(loss.item())
        losses.append(torch.tensor(run))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    assert losses[0][-1] < losses[0][0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(seeded(seed=5).state_dict()),
    "load_state_dict(assign)": lambda m: m.load_state_dict(
        seeded(seed=5).state_dict(), assign=True
    ),
    "data": lambda m: setattr(m.lin.weight, "data", torch.ones(6, 6)),
    "a new parameter": lambda m: setattr(m.lin, "weight", nn.Parameter(torch.ones(6, 6))),
    "a new module": lambda m: setattr(m, "lin", nn.Linear(6, 6)),
    "a new buffer": lambda m: setattr(m, "shift", torch.zeros(6)),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "no bias": lambda m: setattr(m.lin, "bias", None),
    "to(dtype) and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "transposed weight": lambda m: setattr(
        m.lin, "weight", nn.Parameter(m.lin.weight.detach().t().contiguous().t())
    ),
}


@pytest.mark.parametrize("through", ["fused", "original"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_from_both_sides(name: str, through: str) -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    x = draw(4, 6)
    before = fused(x)
    CHANGES[name](fused if through == "fused" else net)
    agree(net, x, fused=fused)
    assert name in ("requires_grad_", "to(dtype) and back", "transposed weight") or not torch.equal(
        fused(x), before
    )
    for (n, a), (m, b) in zip(
        fused.state_dict(keep_vars=True).items(),
        net.state_dict(keep_vars=True).items(),
        strict=True,
    ):
        assert n == m and a is b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double(dtype: torch.dtype) -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    fused(draw(4, 6))
    assert fused.to(dtype) is fused and net.lin.weight.dtype == dtype
    x = draw(4, 6, dtype=dtype)
    torch.testing.assert_close(fused(x), net(x), rtol=2e-2, atol=2e-2)
    fused.float()
    agree(net, draw(4, 6), fused=fused)


def batch_norms() -> dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]]:
    return {
        "1d": lambda: (nn.BatchNorm1d(6), (6,)),
        "1d, long": lambda: (nn.BatchNorm1d(6, affine=False), (6, 5)),
        "2d": lambda: (nn.BatchNorm2d(3), (3, 4, 4)),
        "no statistics": lambda: (nn.BatchNorm1d(6, track_running_stats=False), (6,)),
        "in a net": lambda: (
            nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU()), (6,)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", batch_norms())
def test_batch_norm_in_training(name: str) -> None:
    """Results, gradients and running statistics; another batch, then evaluation."""
    module, shape = batch_norms()[name]()
    twin = copy.deepcopy(module)
    fused = megafuse.fuse(module)
    for batch in (5, 8, 2):
        x = draw(batch, *shape, seed=batch)
        upstream = draw(*module(x.detach()).shape, grad=False)
        module.load_state_dict(twin.state_dict())  # the line above has counted
        got, want = fused(x), twin(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        pairs = zip(
            torch.autograd.grad(got, [x, *module.parameters()], upstream),
            torch.autograd.grad(want, [x, *twin.parameters()], upstream), strict=True,
        )  # fmt: skip
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        for (n, a), (_, b) in zip(module.state_dict().items(), twin.state_dict().items()):
            torch.testing.assert_close(a, b, msg=lambda t, n=n: f"{n}: {t}")
    assert count_plans(fused) == 1
    agree(module.eval(), draw(4, *shape), fused=fused)


def test_one_value_a_channel_is_refused_in_training() -> None:
    norm = nn.BatchNorm1d(6)
    fused = megafuse.fuse(norm)
    fused(draw(4, 6))
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        fused(draw(1, 6))


class Counting(nn.Module):
    """Buffers written in place: a counter, and a running mean that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x - self.average) * x


@pytest.mark.parametrize("grad", [True, False])
def test_buffers_that_forward_writes(grad: bool) -> None:
    module = Counting()
    twin = copy.deepcopy(module)
    fused = megafuse.fuse(module, draw(4, 6, grad=grad))
    assert module.calls == 0  # planning writes nothing
    for k in range(3):
        x = draw(4 + k, 6, seed=k, grad=grad)
        got, want = fused(x), twin(x)
        torch.testing.assert_close(got, want)
        if grad:
            torch.testing.assert_close(
                torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
            )
        torch.testing.assert_close(module.average, twin.average)
        assert module.calls == twin.calls == k + 1


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.calls = 0

    def forward(self, x: Tensor, which: str) -> Tensor:
        if which == "average":
            self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        elif which == "calls":
            self.calls += 1
        elif which == "seen":
            self.seen = x
        return x * 2


@pytest.mark.parametrize("which", ["average", "calls", "seen"])
def test_what_forward_assigns_is_refused_by_name_and_left_alone(which: str) -> None:
    module = Assigning()
    with pytest.raises(UnsupportedError, match=which):
        megafuse.fuse(module)(draw(4, 6), which)
    assert module.calls == 0 and not hasattr(module, "seen")
    assert torch.equal(module.average, torch.zeros(6))
    agree(module, draw(4, 6), "nothing")


def test_parameters_survive_a_failed_trace() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6)] * 2)
            self.again = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x if x.sum() > 0 else -x

    module = Shared()
    owned = [(n, p) for n, p in module.named_parameters(remove_duplicate=False)]
    with pytest.raises(RuntimeError, match="depend on tensor values"):
        megafuse.fuse(module, draw(4, 6))
    after = list(module.named_parameters(remove_duplicate=False))
    assert all(a is b and n == m for (n, a), (m, b) in zip(owned, after, strict=True))
    assert isinstance(module.again, nn.Parameter)
