"""Convolutions on channels-last memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import assert_close_to_float64, kinds, plan_of
from torch import Tensor, nn

import megafuse
from megafuse import passes, zoo
from megafuse.compiler import Plan
from megafuse.fusion.plan import ExternRegion
from megafuse.passes.channels_last import channels_last
from megafuse.subgraphs import Case, Settings
from megafuse.tools.coverage import meta_plan

HALF = torch.bfloat16


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution takes channels last, on a CPU and in float32 too."""
    last = (*passes.LAST, partial(channels_last, any_dtype=True))
    monkeypatch.setattr(passes, "LAST", last)


def calls(plan: Plan) -> list[str]:
    """Targets of the PyTorch calls of both directions."""
    regions = [*plan.forward.regions, *(plan.backward.regions if plan.backward else [])]
    return [r.node.attrs["target"] for r in regions if isinstance(r, ExternRegion)]


class Stem(nn.Module):
    """Convolutions that read a caller's tensor, each other's results, and are an output."""

    def __init__(self, **kwargs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False, **kwargs)  # type: ignore[arg-type]
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.first(x))
        h = h + self.second(h)
        return self.up(h), h.flatten(1)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("groups", [1, 8])
def test_numbers_are_eagers(forced: None, dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    module, x = Stem(groups=groups).to(dtype), torch.randn(3, 3, 12, 10, dtype=dtype)
    fused = assert_close_to_float64(module, [x.requires_grad_()])
    assert calls(plan_of(module, x)).count("megafuse.convolution.default") == 3
    for mine, theirs in zip(fused(x), module(x), strict=True):
        assert mine.stride() == theirs.stride()
    frozen = megafuse.fuse(module, x.detach())  # without a gradient of x
    torch.testing.assert_close(frozen(x.detach())[0], module(x)[0], rtol=2e-2, atol=2e-2)


def test_a_reshape_that_no_loop_addresses(forced: None) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 6, 3, padding=1), torch.randn(2, 3, 5, 5)

    def run(x: Tensor) -> Tensor:
        return module(x).reshape(2, 10, 15) * 2

    torch.testing.assert_close(megafuse.fuse(run, x)(x), run(x))


def test_permutations_of_the_users_own_are_free() -> None:
    """ConvNeXt on a GPU: its gradient reaches the convolution as it lies, and its input is copied
    once in each direction, being the caller's."""
    case = zoo.subgraph("convnext", Settings(None, HALF, torch.device("meta")), "gpu").case(0)
    plan = meta_plan(case)
    assert calls(plan) == ["megafuse.convolution.default", "megafuse.convolution_backward.default"]
    (call,) = (r for r in plan.forward.regions if isinstance(r, ExternRegion))
    assert str(call.node.type).endswith("28, 28, 192]")
    assert kinds(plan)[0].count("rows") == 4  # the copy, norm, gelu, scale and residual
    assert kinds(plan)[1].count("rows") <= 5


def test_left_as_eager_has_them() -> None:
    """Float32, groups that are not depthwise, one-dimensional ones, a CPU."""
    x = torch.randn(2, 8, 6, 6)
    grouped = nn.Conv2d(8, 8, 3, groups=2).to(HALF)
    line = nn.Conv1d(8, 8, 3).to(HALF)
    for module, given in (
        (nn.Conv2d(8, 8, 3), x), (grouped, x.to(HALF)), (line, x[:, :, 0].to(HALF)),
    ):  # fmt: skip
        plan = meta_plan(Case(module.to("meta"), (given.to("meta"),)))
        assert set(calls(plan)) <= {"aten.convolution.default", "aten.convolution_backward.default"}
    assert calls(plan_of(nn.Conv2d(8, 8, 3).to(HALF), x.to(HALF)))[0] == "aten.convolution.default"
