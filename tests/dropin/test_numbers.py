"""Values that expose arithmetic: NaN, Inf, large means, tiny scales, constant rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from parity import agree, draw, seeded
from support import assert_close_to_float64, step, upstream_for
from torch import Tensor, nn

import megafuse
from megafuse import FusedModule

WIDTH = 33


class Block(nn.Module):
    """Two norms, a softmax and products: every kind of row program."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-3)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(self.first(x)))
        return self.second(x + h) * torch.softmax(h, -1)


@pytest.fixture(scope="module")
def block() -> Block:
    return seeded(Block)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def fused(block: Block) -> FusedModule:
    return megafuse.fuse(block)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite_stays_in_its_sample(fused: FusedModule, bad: float) -> None:
    x = draw(5, WIDTH)
    upstream = upstream_for([fused(x)])
    clean = step(fused, [], [x], upstream)
    dirty = x.detach().clone()
    dirty[2, 7] = bad
    got = step(fused, [], [dirty.requires_grad_()], upstream)
    want = step(fused.original, [], [dirty], upstream)
    rows = [0, 1, 3, 4]
    for a, b, c in zip(got, clean, want, strict=True):
        assert a is not None and b is not None and c is not None
        assert torch.equal(a[rows], b[rows])
        # Of huge values eager may overflow where double arithmetic does not.
        assert bool((a.isfinite() >= c.isfinite()).all() if bad == 3e38 else
                    (a.isfinite() == c.isfinite()).all())  # fmt: skip
    assert bad == 3e38 or not got[0][2].isfinite().all()  # type: ignore[index]


@pytest.mark.parametrize(
    "dtype, shift, scale",
    [
        (torch.float32, 1e4, 1.0), (torch.float32, 0.0, 1e-4), (torch.float32, 1.0, 1e-4),
        (torch.bfloat16, 64.0, 1.0), (torch.bfloat16, 0.0, 1e-4), (torch.float16, 0.0, 1e-4),
        (torch.float32, 0.0, 1e12),
    ],
)  # fmt: skip
def test_shifted_and_scaled_inputs(dtype: torch.dtype, shift: float, scale: float) -> None:
    module = seeded(Block).to(dtype)
    x = (draw(6, WIDTH, grad=False) * scale + shift).to(dtype).requires_grad_()
    assert_close_to_float64(module, [x])


def test_constant_rows(fused: FusedModule, block: Block) -> None:
    x = draw(5, WIDTH, grad=False)
    x[1], x[3] = 0.0, -7.25
    assert_close_to_float64(block, [x.requires_grad_()], fused=fused)


def test_extreme_scores_in_a_softmax() -> None:
    x = draw(4, WIDTH, grad=False) * 100
    x[1, 3], x[2] = -float("inf"), 88.0
    soft = nn.Softmax(-1)
    assert_close_to_float64(soft, [x.requires_grad_()])
    all_masked = torch.full((2, WIDTH), -float("inf"))
    assert megafuse.fuse(soft)(all_masked).isnan().all() and soft(all_masked).isnan().all()


def test_subnormal_and_huge_values_through_pointwise_code() -> None:
    x = torch.tensor([[1e-40, -1e-45, 3e38, -3e38, 1e30, 0.0, -0.0, 1.0]] * 3)
    for code in (lambda x: x * 0.5, lambda x: torch.tanh(x), lambda x: x.relu() + x, torch.sigmoid):
        assert torch.equal(megafuse.fuse(code)(x), code(x))


@pytest.mark.parametrize("dims", [(1,), (0,), (0, 1)], ids=str)
def test_gradients_of_a_maximum_find_where_it_is(dims: tuple[int, ...]) -> None:
    """The gradient asks where a value equals its maximum: never of a value computed anew."""

    def code(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.exp(torch.tanh(x)) * w + 0.3 * x
        return h.amax(dims), (h / (w.abs() + 0.5)).amin(dims, keepdim=True)

    for batch in (1, 5):
        agree(code, draw(batch, WIDTH), draw(WIDTH, seed=2))
