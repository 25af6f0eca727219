"""What forward saves for backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import block_case, plan_of
from torch import Tensor, nn
from torch.nn import functional as F

from megafuse import Options
from megafuse.compiler import Plan
from megafuse.invariants import check_graph
from megafuse.ir import evaluate

X = torch.randn(5, 8, requires_grad=True)


def saved_bytes(plan: Plan) -> int:
    return sum(evaluate(n.type.nbytes, plan.hints) for n in plan.split.saved)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 8))


@pytest.mark.parametrize(
    "module, saved",
    [
        (nn.Sequential(nn.GELU(), nn.Tanh(), nn.SiLU()), []),
        (nn.LayerNorm(8), ["div", "rsqrt"]),
        (nn.Softmax(-1), ["amax", "sum"]),
        (nn.Linear(8, 4), []),
        (mlp(), ["matmul", "div", "rsqrt", "mul"]),
    ],
)
def test_saved_set(module: nn.Module, saved: list[str]) -> None:
    plan = plan_of(module, X)
    assert [n.op for n in plan.split.saved] == saved
    rows = [n for n in plan.split.saved if n.op in ("div", "rsqrt", "amax", "sum")]
    assert all(n.shape[-1] == 1 and n.dtype == torch.float32 for n in rows)


def test_min_saves_less_than_balanced() -> None:
    case = block_case((3, 8, 72, 2))
    balanced, least = (
        plan_of(case.module, *case.args, options=Options(memory=memory))
        for memory in ("balanced", "min")
    )
    assert saved_bytes(least) < saved_bytes(balanced)
    assert {n.op for n in balanced.split.saved} == {"matmul", "div", "rsqrt", "add", "mul"}
    # What is left is what cannot be recomputed: products and row statistics.
    assert {n.op for n in least.split.saved} == {"matmul", "div", "rsqrt"}


@pytest.mark.parametrize("memory", ["balanced", "min"])
def test_split_is_legal_and_recomputes_no_product(memory: str) -> None:
    plan = plan_of(mlp(), X, options=Options(memory=memory))  # type: ignore[arg-type]
    split, primals = plan.split, len(plan.captured.graph.inputs) - 1
    assert split.backward is not None
    check_graph(split.forward)
    check_graph(split.backward)
    saved = split.forward.outputs[plan.captured.outputs :]
    assert len(saved) == len(split.saved)
    assert all(n is not None and n.op != "input" for n in saved)
    roles = [n.attrs["role"] for n in split.backward.inputs]
    assert roles == ["primal"] * primals + ["saved"] * len(saved) + ["grad"]
    products = [n for n in plan.joint.nodes if n.op == "matmul"]
    kept = [n for g in (split.forward, split.backward) for n in g.nodes if n.op == "matmul"]
    assert len(kept) == len(products) == 6


def test_without_gradients_there_is_no_backward_and_nothing_saved() -> None:
    with torch.no_grad():
        plan = plan_of(mlp(), X)
    assert plan.split.backward is None and plan.backward is None and plan.split.saved == ()
    assert len(plan.split.forward.outputs) == plan.captured.outputs == 1


@pytest.mark.parametrize("op", [torch.sigmoid, torch.exp, torch.relu, lambda x: x * x])
def test_pointwise_chains_save_only_the_input(op: Callable[[Tensor], Tensor]) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(op(x) + 1.0) * x

    assert plan_of(Module(), X).split.saved == ()


def mixed(x: Tensor, residual: bool) -> Tensor:
    """[B, 4, 12] normalised, then put together anew from pieces of three elements."""
    y = F.layer_norm(x, x.shape[-1:])
    y = y.reshape(-1, 4, 4, 3).transpose(1, 2).reshape(-1, 4, 12)
    return F.layer_norm(y + x if residual else y * 2, x.shape[-1:])


@pytest.mark.parametrize("memory, saves", [("balanced", True), ("min", False)])
def test_what_is_gathered_from_normalised_rows_is_kept(memory: str, saves: bool) -> None:
    x = torch.randn(5, 4, 12, requires_grad=True)
    for residual in (True, False):
        plan = plan_of(
            lambda x, residual=residual: mixed(x, residual), x,
            options=Options(memory=memory),  # type: ignore[arg-type]
        )  # fmt: skip
        kept = [n for n in plan.split.saved if n.shape[-1] == 12]
        assert len(kept) == saves


def test_rows_that_come_whole_are_computed_again() -> None:
    def whole(x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:]).reshape(-1, 2, 2, 12).transpose(1, 2)
        return F.layer_norm(y.reshape(-1, 4, 12) * 2, x.shape[-1:])

    plan = plan_of(whole, torch.randn(6, 4, 12, requires_grad=True))
    assert all(n.shape[-1] == 1 for n in plan.split.saved)


def test_columns_are_computed_again() -> None:
    """Statistics of columns lie side by side, however the tensor is turned."""

    def columns(x: Tensor) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)).transpose(1, 2) + 1
        return F.layer_norm(y, y.shape[-1:])

    plan = plan_of(columns, torch.randn(6, 4, 12, requires_grad=True))
    assert all(1 in n.shape for n in plan.split.saved)
