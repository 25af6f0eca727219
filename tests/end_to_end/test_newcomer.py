"""What a first user ran into; the right value is eager's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafuse


def agree(f: Callable[..., Any], *inputs: Tensor) -> None:
    """Outputs, requires_grad and gradients of the first output equal eager's."""
    fused = megafuse.fuse(f, *inputs)
    ours, eager = fused(*inputs), f(*inputs)
    ours, eager = (r if isinstance(r, tuple) else (r,) for r in (ours, eager))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    if not eager[0].requires_grad:
        return
    wanted = [t for t in inputs if t.requires_grad]
    if isinstance(f, nn.Module):
        wanted += list(f.parameters())
    upstream = torch.randn_like(eager[0])
    for a, b in zip(torch.autograd.grad(ours[0], wanted, upstream),
                    torch.autograd.grad(eager[0], wanted, upstream), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, requires_grad=True)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.a(x))
        return h, h.detach()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_a_value_and_its_detached_self(x: Tensor) -> None:
    agree(Twice(), x)


def test_an_unused_head_has_no_gradient(x: Tensor) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    module = Heads()
    fused = megafuse.fuse(module, x)
    fused(x)[0].sum().backward()
    assert module.b.weight.grad is None and module.b.bias.grad is None
    torch.testing.assert_close(module.a.bias.grad, torch.full((8,), 4.0))


def test_casts_the_user_wrote_round(x: Tensor) -> None:
    agree(lambda x: x - x.bfloat16().float(), x)


def test_tied_weights(x: Tensor) -> None:
    agree(Tied(), x)


def test_batch_by_batch(x: Tensor) -> None:
    agree(lambda x: (x @ x.T).softmax(-1), x)


def test_convolutions_with_gradients_nobody_wants() -> None:
    x = torch.randn(4, 6, 8, requires_grad=True)
    agree(nn.Conv1d(6, 8, 3, bias=False), x)
    agree(nn.Conv1d(6, 8, 3), x.detach())


def test_modes_and_hooks_of_submodules_are_part_of_the_key(x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    fused = megafuse.fuse(module.eval(), x)
    torch.testing.assert_close(fused(x), module(x))
    module.train()
    assert not torch.equal(fused(x), fused(x))
    module[1].eval()
    torch.testing.assert_close(fused(x), module(x))
    seen: list[int] = []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    fused(x)
    assert seen


def test_modes_of_a_module_argument_are_part_of_the_key(x: Tensor) -> None:
    def apply(x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x) * 2

    drop = nn.Dropout(0.5).eval()
    fused = megafuse.fuse(apply, x, drop)
    torch.testing.assert_close(fused(x, drop), x * 2)
    drop.train()
    assert not torch.equal(fused(x, drop), fused(x, drop))


def test_first_calls_from_two_threads_leave_the_module_alone(x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    fused = megafuse.fuse(module)
    faults: list[BaseException] = []

    def call(rows: int) -> None:
        try:
            fused(torch.randn(3, rows, 8))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert all(p.device.type == "cpu" for p in module.parameters())
    torch.testing.assert_close(fused(x), module(x))


@pytest.mark.parametrize(
    "f", [lambda x: x[:, [1, 0]], lambda x: x + torch.ones(8)], ids=["index", "ones"]
)
def test_constants_are_refused_with_the_way_out(f: Callable[..., Tensor], x: Tensor) -> None:
    with pytest.raises(megafuse.MegafuseError, match="register it as a buffer"):
        megafuse.fuse(f, x)


def test_a_wrong_shape_is_also_a_runtime_error(x: Tensor) -> None:
    with pytest.raises(RuntimeError):
        megafuse.fuse(nn.Linear(7, 3), x)
