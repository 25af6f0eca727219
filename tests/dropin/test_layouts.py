"""Strides and memory: outputs and gradients lie as eager's do, views are views, copies copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import Net, agree, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last).detach().requires_grad_()


INPUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: draw(6, 4).detach().t().requires_grad_(),
    "permuted": lambda: draw(3, 5, 4).detach().permute(2, 0, 1).requires_grad_(),
    "channels last": lambda: channels_last(draw(2, 3, 4, 5)),
    "sliced": lambda: draw(4, 12).detach()[:, ::2].requires_grad_(),
    "one row": lambda: draw(5, 1).detach().t().requires_grad_(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_pointwise_results_keep_the_strides_of_their_input(name: str) -> None:
    agree(lambda x: torch.tanh(x) * 2 + x, INPUTS[name]())


CODE: dict[str, Callable[..., Any]] = {
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]) + 1,
    "softmax": lambda x: x.softmax(-1) * x,
    "sum": lambda x: (x.exp().sum(-1), x.exp().mean(0)),
    "product": lambda x: (x @ x.t()).exp(),
}


@pytest.mark.parametrize("name", CODE)
def test_reductions_and_products_of_a_transposed_input(name: str) -> None:
    agree(CODE[name], INPUTS["transposed"]())


def test_a_transposed_output_and_its_gradient() -> None:
    agree(lambda x: (x.exp().t(), (x * 2).reshape(4, 2, 3).permute(2, 0, 1)), draw(4, 6))


def test_two_layouts_meet() -> None:
    agree(lambda x, y: (x * y, y * x), INPUTS["transposed"](), draw(4, 6))


def test_expanded_input() -> None:
    x = draw(1, 6).detach().expand(4, 6).requires_grad_()
    agree(lambda x: torch.tanh(x) + x, x)


def test_conv_net_in_channels_last() -> None:
    net = seeded(lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())).eval()
    agree(net, channels_last(draw(2, 3, 4, 4)))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: (x, x * 2),
    "view": lambda x: (x.view(2, -1), x * 2),
    "transpose": lambda x: (x.t(), x * 2),
    "slice": lambda x: (x[1:, ::2], x * 2),
    "expand": lambda x: (x[:1].expand(3, 6), x * 2),
    "detach": lambda x: (x.detach(), x * 2),
    "chunks": lambda x: (*x.chunk(2, 1), x * 2),
    "clone": lambda x: (x.clone(), x.t().clone(), x * 2),
    "contiguous": lambda x: (x.contiguous(), x.t().contiguous(), x * 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_outputs_that_are_inputs_or_views_of_them(name: str) -> None:
    x = draw(4, 6)
    fused = agree(VIEWS[name], x)
    got, want = fused(x), VIEWS[name](x)
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
        assert (a is x) == (b is x)


def test_only_views() -> None:
    x = draw(4, 6)
    out = megafuse.fuse(lambda x: x.t())(x)
    assert out.data_ptr() == x.data_ptr() and out.shape == (6, 4)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones(4, 6))


def test_writing_to_a_view_writes_to_its_input() -> None:
    fused = megafuse.fuse(lambda x: (x.view(-1), x * 2))
    x = draw(4, 6, grad=False)
    seen, _ = fused(x)
    seen[0] = 9.0
    assert x[0, 0] == 9.0


def test_layouts_share_a_plan_where_results_lie_the_same() -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)))
    fused = megafuse.fuse(net)
    for x in (draw(4, 6), INPUTS["sliced"]()):
        agree(net, x, fused=fused)
    assert count_plans(fused) == 1
    agree(net, INPUTS["transposed"](), fused=fused)  # whose gradient is transposed
    assert count_plans(fused) == 2


def test_net() -> None:
    for name in ("transposed", "sliced", "one row"):
        net = seeded(lambda name=name: Net(INPUTS[name]().shape[-1]))
        agree(net, INPUTS[name]())


def _equal_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.relu(x * 2)
    return y, y.clone(), torch.relu(x * 2)


def test_equal_results_are_apart_where_eagers_are() -> None:
    """One value here, three tensors there: writing to one must leave the others alone."""
    x = torch.randn(4, 6)
    fused = megafuse.fuse(_equal_results, x)
    first, second, third = fused(x)
    first.zero_()
    want = _equal_results(x)
    assert torch.equal(second, want[1]) and torch.equal(third, want[2])


def test_a_result_returned_twice_is_one_memory() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x * 2)
        return y, y.view(-1)

    x = torch.randn(4, 6)
    first, second = megafuse.fuse(twice, x)(x)
    first.zero_()
    assert not second.any()


def test_numbers_computed_from_sizes_stay_fractions() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.double() * (x.shape[0] * 0.5) + 1

    fused = megafuse.fuse(scaled, torch.randn(3, 4))
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(fused(x), scaled(x))
