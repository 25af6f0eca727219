"""Composite operators open into generated code, and compute what PyTorch computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_close_to_float64, kinds, plan_of
from torch import Tensor, nn

import megafuse

LABELS = torch.tensor([0, 10, 3, -100, 7])
WEIGHT = torch.rand(11, generator=torch.Generator().manual_seed(0)) + 0.5


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args) if self._modules else self.function(*args)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def externs(plan: Any) -> set[str]:
    graphs = [g for g in (plan.forward, plan.backward) if g is not None]
    return {r.node.attrs["target"] for g in graphs for r in g.regions if r.kind == "extern"}


OPEN: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "group norm": (lambda x: F.group_norm(x, 3), (4, 6, 5)),
    "logsumexp": (lambda x: x.logsumexp(-1), (5, 11)),
    "logsumexp of planes": (lambda x: x.logsumexp((1, 2), keepdim=True), (4, 3, 5)),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), (5, 11)),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=1), (5, 11)),
    "largest norm": (lambda x: torch.linalg.vector_norm(x.detach(), math.inf, dim=1), (5, 11)),
    "sign": (lambda x: torch.sign(x) * x + x.sgn(), (5, 11)),
    "var_mean": (lambda x: torch.var_mean(x, dim=-1), (5, 11)),
    "std_mean": (lambda x: torch.std_mean(x, dim=(1, 2), keepdim=True), (4, 3, 5)),
    "normalize": (lambda x: F.normalize(x, dim=1), (5, 11)),
    "rms_norm": (lambda x: F.rms_norm(x, (11,)), (5, 11)),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, x.flip(1) * 0 + 0.3), (5, 11)),
    "dropout in eval": (lambda x: F.dropout(torch.sin(x), 0.5, training=False), (5, 11)),
    "instance norm": (lambda x: F.instance_norm(x), (3, 4, 5, 2)),
    "pad and cut": (lambda x: F.pad(x, (1, -2, 0, 3), value=0.5).exp(), (4, 3, 5)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2) * 2, (2, 8, 3, 3)),
    "bounds from a tensor": (lambda x: x.clamp(min=x.mean(1, keepdim=True)), (5, 11)),
    "distance": (lambda x: F.pairwise_distance(x, x.detach() * 0.5), (5, 11)),
    "boolean algebra": (lambda x: torch.where((x > 0) & ~(x > 1) | (x < -1), x, x * 2), (5, 11)),
    "every other element": (
        lambda x: torch.stack([x[..., ::2] - x[..., 1::2], x[..., 1::2] * 2], -1).flatten(-2),
        (5, 12),
    ),
    "unbind and stack": (lambda x: torch.stack([z.sin() for z in x.unbind(1)], -1), (5, 3, 4)),
    "split and cat": (lambda x: torch.cat(x.split([3, 8], 1)[::-1], 1) * x, (5, 11)),
}


@pytest.mark.parametrize("name", OPEN)
def test_nothing_is_left_to_pytorch(name: str) -> None:
    function, shape = OPEN[name]
    x = normal(*shape)
    if name != "smooth_l1":  # flip is PyTorch's
        assert externs(plan_of(function, x)) == set()
    assert_close_to_float64(Of(function), [x])


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_eval(affine: bool) -> None:
    norm = nn.BatchNorm2d(6, affine=affine).eval()
    norm.running_mean, norm.running_var = torch.randn(6), torch.rand(6) + 0.5
    module = Of(lambda m, x: torch.relu(m.norm(x) + x), norm=norm)
    x = normal(5, 6, 3, 4)
    assert externs(plan_of(module, x)) == set()
    assert_close_to_float64(module, [x])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_losses_by_label(reduction: str, weight: Tensor | None) -> None:
    """Labels are compared along the row: no gather, no scatter, nothing of [n, classes] written."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight if weight is None else nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(x, labels, weight=self.weight, reduction=reduction)

    x = normal(5, 11)
    left = externs(plan_of(Weighted(), x, LABELS))
    assert left == {"aten.arange.default", "aten._to_copy.default"}
    assert_close_to_float64(Weighted(), [x, LABELS])


def test_rows_of_twenty_thousand_classes() -> None:
    """Too long for registers: the row is read again in each phase, nothing spills."""
    x, labels = normal(3, 20_001), torch.tensor([20_000, 0, 77])
    module = Of(lambda x, labels: F.cross_entropy(x * 2, labels) + x.softmax(1)[:, 7].sum())
    assert_close_to_float64(module, [x, labels])


def test_an_ignored_or_infinite_row_stays_its_own() -> None:
    x = normal(5, 11).detach()
    x[3] = math.nan  # ignored
    x = x.requires_grad_()
    fused = megafuse.fuse(F.cross_entropy)
    got, want = fused(x, LABELS), F.cross_entropy(x, LABELS)
    torch.testing.assert_close(got, want)
    (mine,) = torch.autograd.grad(got, x)
    (theirs,) = torch.autograd.grad(want, x)
    torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_logsumexp_of_nothing_but_infinities() -> None:
    x = torch.full((3, 7), -math.inf)
    x[1, 2], x[2] = math.inf, 1.0
    torch.testing.assert_close(megafuse.fuse(lambda x: x.logsumexp(1))(x), x.logsumexp(1))


@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_triangles(diagonal: int) -> None:
    def both(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return x.tril(diagonal) * 2, x.triu(diagonal), x.masked_fill(mask.triu(diagonal), 0.5)

    x, mask = normal(3, 5, 7), torch.ones(5, 7, dtype=torch.bool)
    assert externs(plan_of(both, x, mask)) <= {"aten.arange.default"}
    for got, want in zip(megafuse.fuse(both)(x, mask), both(x, mask), strict=True):
        assert torch.equal(got, want)


def test_writing_one_slice_of_an_intermediate() -> None:
    def write(x: Tensor) -> Tensor:
        h = x * 2
        h[:, 1] = h[:, 0].exp()
        return h * x

    x = normal(4, 3, 5)
    assert externs(plan_of(write, x)) == set()
    assert_close_to_float64(Of(write), [x])


def test_dropout_in_training_draws_from_pytorchs_generator() -> None:
    """The same seed gives eager's own mask, forward and backward."""
    layer = Of(lambda x: F.dropout(torch.sin(x) + 1.5, 0.3))
    fused, x = megafuse.fuse(layer), normal(40, 30)
    torch.manual_seed(5)
    want = layer(x)
    (theirs,) = torch.autograd.grad(want.sum(), x)
    torch.manual_seed(5)
    got = fused(x)
    (mine,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)
    assert not torch.equal(fused(x), got)


def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **how)


@pytest.mark.parametrize("how", [{}, {"is_causal": True, "scale": 0.2}], ids=["plain", "causal"])
def test_attention_is_pytorchs_kernel(how: dict[str, Any]) -> None:
    def heads(packed: Tensor) -> Tensor:
        q, k, v = packed.view(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, **how).transpose(1, 2).reshape(2, 9, 32).sin()

    packed = normal(2, 9, 96)
    plan = plan_of(heads, packed)
    assert externs(plan) == {"megafuse.attention.default", "megafuse.attention_backward.default"}
    assert kinds(plan)[0] == ["extern", "rows"], "q, k, v are read where they lie"
    assert_close_to_float64(Of(heads), [packed])


def test_attention_inside_torchs_own_module() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    module = Of(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)
    x = normal(2, 9, 32)
    assert "megafuse.attention.default" in externs(plan_of(module, x))
    assert_close_to_float64(module, [x])


MASKED = {"megafuse.masked_attention.default", "megafuse.masked_attention_backward.default"}


def test_attention_with_a_mask_stays_whole() -> None:
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0, 0, 3] = False  # a row that may look nowhere

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return attend(x * 2, x * 0.5, x.sin(), attn_mask=mask)

    x = normal(2, 4, 9, 8)
    assert externs(plan_of(masked, x, mask)) == MASKED
    fused = megafuse.fuse(masked)
    got, want = fused(x, mask), masked(x, mask)
    torch.testing.assert_close(got, want, equal_nan=True)
    mine, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(mine, theirs, equal_nan=True)
    additive = torch.where(mask, 0.0, -2.0)
    assert_close_to_float64(Of(masked), [x, additive])


def test_grouped_heads_and_odd_sizes_stay_whole() -> None:
    def grouped(q: Tensor, k: Tensor) -> Tensor:
        return attend(q.sin(), k.sin(), k, is_causal=True, enable_gqa=True)

    q, k = normal(2, 4, 9, 8), normal(2, 2, 9, 8)
    # PyTorch 2.6 has no kernel for grouped heads on a CPU, and opens them itself
    assert externs(plan_of(grouped, q, k)) <= MASKED | {"aten.arange.default"}
    assert_close_to_float64(Of(grouped), [q, k])
    odd = normal(2, 3, 9, 5)
    assert_close_to_float64(Of(lambda x: attend(x.sin(), x, x)), [odd])


def test_a_trained_mask_opens() -> None:
    def biased(x: Tensor, bias: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=bias)

    x, bias = normal(2, 4, 9, 8), torch.zeros(9, 9, requires_grad=True)
    assert externs(plan_of(biased, x, bias)) == set()
    assert_close_to_float64(Of(biased), [x, bias])


def test_calls_outside_are_not_touched_while_tracing() -> None:
    """PyTorch's function is back after a trace, also one that fails."""
    before = F.scaled_dot_product_attention

    def fails(x: Tensor) -> Tensor:
        return x * (1.0 if x.sum() > 0 else 2.0)

    with pytest.raises(megafuse.errors.MegafuseError):
        megafuse.fuse(fails, normal(3, 4))
    assert F.scaled_dot_product_attention is before
