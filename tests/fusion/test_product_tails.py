"""Row regions that a product does itself: which, with which tensors, and why not others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.device import H200
from megafuse.fusion.describe import boundaries, read_bytes, summarize, written_bytes
from megafuse.fusion.plan import GraphPlan, MatmulRegion, RowRegion


def planned(f: Callable[..., Any], *shapes: tuple[int, ...], fuel: int | None = None,
            dtype: torch.dtype = torch.bfloat16) -> Plan:  # fmt: skip
    """All but the first are parameters; every one wants a gradient."""
    tensors = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]

    def function(values: Sequence[Tensor]) -> Any:
        return f(*values)

    parameters = [i > 0 for i in range(len(tensors))]
    return make_plan(function, tensors, parameters, [True] * len(tensors), None,
                     Options(fuel=fuel), epilogues=True)  # fmt: skip


def tails(plan: GraphPlan | None) -> list[MatmulRegion]:
    assert plan is not None
    return [r for r in plan.regions if isinstance(r, MatmulRegion) and r.tail]


def rows(plan: GraphPlan | None) -> list[RowRegion]:
    assert plan is not None
    return [r for r in plan.regions if isinstance(r, RowRegion)]


WIDE = (64, 1024), (1024, 512), (1024, 512)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


def test_a_gate_is_the_second_products_work() -> None:
    plan = planned(gated, *WIDE)
    (region,) = tails(plan.forward)
    assert rows(plan.forward) == []
    assert region.tail is not None
    (read, operand), = region.tail.ins
    assert read.node.op == "matmul" and operand.strides[1:] == (512, 1)
    kept = [root is None for root, _ in region.tail.outs]
    assert kept == [True, False], "backward reads the product itself"
    assert region.node in region.writes() and len(region.writes()) == 2


def test_a_gate_is_explained() -> None:
    plan = planned(gated, *WIDE)
    first, second = plan.forward.regions
    (why,) = boundaries(plan.forward)[first.name]
    assert why.consumer == second.name and "a tile at a time" in why.reason
    summary = summarize(plan, plan.hints, H200)
    homes = {o.name: o.regions for o in summary.unfused if o.direction == "forward"}
    assert homes["silu"] == homes["mul"] == (second.name,), "a tail is where they went"


def test_gradients_of_a_gate_follow_a_product() -> None:
    def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gated(x, gate, up) @ down

    plan = planned(block, *WIDE, (512, 1024))
    assert plan.backward is not None
    (region,) = [r for r in tails(plan.backward) if r.tail and len(r.tail.ins) == 2]
    assert region.tail is not None and len(region.tail.outs) == 2
    assert region.node not in region.writes(), "nobody else reads the hidden gradient"
    # Two reads of [64, 512] beside the operands, two results, and no hidden gradient in memory.
    size = 64 * 512 * 2
    sizes = plan.hints
    assert written_bytes(region, sizes) == 2 * size
    assert sum(read_bytes(region, n, plan.backward.buffers, sizes)
               for n in (o.buffer for _, o in region.tail.ins)) == 2 * size  # fmt: skip


def test_bias_gradients_are_column_sums_of_the_tail() -> None:
    def block(x: Tensor, w: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w, bias)) @ down

    plan = planned(block, (64, 1024), (512, 1024), (512,), (512, 1024))
    (region,) = tails(plan.backward)
    assert region.tail is not None
    assert [r.kind for r in region.tail.sums] == ["column"] and not region.tail.each
    assert len(region.tail.ins) == 1, "the sum is over what the tail makes, not over what it reads"


def test_batches_keep_their_own_sums() -> None:
    def block(x: Tensor, w: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return torch.relu(x @ w + bias) @ down

    shapes = (64, 4, 1024), (4, 1024, 512), (4, 1, 512), (4, 512, 1024)

    def tokens(x: Tensor, *others: Tensor) -> Tensor:
        return block(x.transpose(0, 1), *others)

    summed, turned = tails(planned(tokens, *shapes).backward)
    assert summed.tail is not None and summed.tail.sums and summed.tail.each
    # The gradient of x is written where x's own order wants it.
    assert turned.tail is not None and turned.writes() != [turned.node]
    ((_, operand),) = turned.tail.outs
    assert operand.strides == (1024, 4096, 1)


@pytest.mark.parametrize(
    "f,shapes,why",
    [
        (lambda x, w: torch.softmax(x @ w, -1), ((64, 1024), (1024, 512)), "whole rows"),
        (lambda x, w, y: (x @ w).t() * y, ((64, 1024), (1024, 512), (512, 64)), "otherwise"),
        (lambda x, w, s: (x @ w).relu() * s, ((64, 1024), (1024, 512), (512,)), "once for all"),
        (lambda x, w: torch.erf(torch.tanh(x @ w)), ((64, 16), (16, 512)), "leaves time"),
        (lambda x, w: (x @ w)[:, :256] * (x @ w)[:, 256:], ((64, 1024), (1024, 512)), "places"),
    ],
    ids=["softmax", "turned", "row", "short", "halves"],
)
def test_what_stays_apart_says_why(
    f: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], why: str
) -> None:
    plan = planned(f, *shapes)
    assert not tails(plan.forward)
    products = {r.name for r in plan.forward.regions if isinstance(r, MatmulRegion)}
    reasons = [w.reason for name in products for w in boundaries(plan.forward)[name]]
    assert any(why in r for r in reasons), reasons


def test_float32_products_have_none() -> None:
    assert not tails(planned(gated, *WIDE, dtype=torch.float32).forward)


def test_fuel_counts_tails() -> None:
    full = planned(gated, *WIDE)
    count = len(full.forward.merges)
    assert count and isinstance(full.forward.merges[-1].first, MatmulRegion)
    assert not tails(planned(gated, *WIDE, fuel=count - 1).forward)
    assert tails(planned(gated, *WIDE, fuel=count).forward)
