"""The plan of the block and of its variants: it follows from general rules, not from its name."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import REPOSITORY, block_case, kinds, plan_of
from torch import Tensor

import megafuse
from megafuse import Options, workload
from megafuse.compiler import Plan
from megafuse.fusion.describe import boundaries
from megafuse.fusion.plan import GraphPlan, MatmulRegion, RowRegion
from megafuse.runtime.built import emit_host

FORWARD = ["group", "matmul", "rows", "matmul", "rows"]
BACKWARD = ["rows", "matmul", "matmul", "rows", "matmul", "matmul", "group"]
SHAPE = (3, 8, 72, 2)


def identity(x: Tensor) -> Tensor:
    return x


def variant(
    *, without: tuple[str, ...] = (), act: Callable[[Tensor], Tensor] = F.silu, mix: bool = True,
    order: str = "post",
) -> torch.nn.Module:  # fmt: skip
    """The block's parts put together differently."""
    workload._import(workload.ENTRY)
    block = sys.modules[f"{workload.PACKAGE}.block"]

    class Variant(block.RankMixerBlockFwd):  # type: ignore[misc, name-defined]
        def forward(self, inputs: Tensor) -> Tensor:
            norm0, norm1, norm2, gate = (
                identity if n in without else getattr(self, n)
                for n in ("norm0", "norm1", "norm2", "norm_gate")
            )
            mixed = norm0(inputs)
            mixed = block.token_mixer(mixed) if mix else mixed
            out1 = norm1(mixed + inputs) if order == "post" else norm1(mixed) + inputs
            z = torch.bmm(out1.transpose(0, 1), self.w1) + self.b1.unsqueeze(1)
            u, g = z.chunk(2, dim=-1)
            hidden = self.norm_x(u) * act(gate(g))
            out2 = (torch.bmm(hidden, self.wout) + self.bout.unsqueeze(1)).transpose(0, 1)
            return norm2(out1 + out2) if order == "post" else out1 + norm2(out2)

    return Variant(*SHAPE[1:])


def variant_plan(**changes: Any) -> Plan:
    torch.manual_seed(0)
    b, t, d, _ = SHAPE
    return plan_of(variant(**changes), torch.randn(b, t, d, requires_grad=True))


@pytest.fixture(scope="module")
def block_plan() -> Plan:
    case = block_case(SHAPE, torch.bfloat16)
    return plan_of(case.module, *case.args, **case.kwargs)


def directions(plan: Plan) -> list[GraphPlan]:
    return [p for p in (plan.forward, plan.backward) if p is not None]


def assert_no_copies(plan: Plan) -> None:
    """Each write is a result, or is read by another region or another stage of its group."""
    for part in directions(plan):
        needed = {o.buffer for o in part.results if o is not None}
        for region in part.regions:
            needed |= set(region.reads(part.buffers))
            for stage in region.stages if isinstance(region, RowRegion) else ():
                own = {r.target for r in stage.roots}
                needed |= {x.node for r in stage.roots for x in r.reads if x.node not in own}
        for region in part.regions:
            idle = [n for n in region.writes() if n not in needed]
            assert not idle, f"{region.name} writes {idle}, which nobody reads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block(dtype: torch.dtype) -> None:
    case = block_case(SHAPE, dtype)
    plan = plan_of(case.module, *case.args, **case.kwargs)
    assert kinds(plan) == (FORWARD, BACKWARD)
    assert [r.name for r in plan.forward.regions] == ["F1", "F2", "F3", "F4", "F5"]
    assert_no_copies(plan)


@pytest.mark.parametrize("shape", [(1024, 64, 1280, 2), (64, 16, 512, 3), (1, 8, 64, 2)])
def test_block_at_other_shapes(shape: tuple[int, ...]) -> None:
    b, t, d, k = shape
    # Planning looks at no value, so the weights stay unset: no memory is touched.
    module = workload._import(workload.ENTRY).RankMixerBlockFwd(
        t, d, k, device="meta", dtype=torch.bfloat16
    )
    module = module.to_empty(device="cpu")
    x = torch.empty(b, t, d, dtype=torch.bfloat16, requires_grad=True)
    plan = plan_of(module, x)
    assert kinds(plan) == (FORWARD, BACKWARD)
    assert_no_copies(plan)


def test_dense_ffn() -> None:
    case = block_case(SHAPE, name="dense_ffn")
    plan = plan_of(case.module, *case.args)
    assert kinds(plan) == (
        ["matmul", "rows", "matmul", "rows"],
        ["rows", "matmul", "matmul", "rows", "matmul", "matmul"],
    )
    assert_no_copies(plan)


@pytest.mark.parametrize(
    "changes, forward, backward",
    [
        ({}, FORWARD, BACKWARD),
        ({"without": ("norm0",)}, ["rows", *FORWARD[1:]], BACKWARD),
        ({"without": ("norm1",)}, FORWARD, [*BACKWARD[:-1], "rows"]),
        # norm2 gone, the products of backward start from the upstream gradient itself; the sum of
        # bout's gradient joins norm1's backward, which then cannot share a group with mixing.
        ({"without": ("norm2",)}, FORWARD,
         ["matmul", "matmul", "rows", "matmul", "matmul", "rows", "rows"]),
        ({"without": ("norm_gate",)}, FORWARD, BACKWARD),
        ({"act": F.gelu}, FORWARD, BACKWARD),
        ({"act": F.relu}, FORWARD, BACKWARD),
        ({"mix": False}, ["rows", *FORWARD[1:]], [*BACKWARD[:-1], "rows"]),
        ({"order": "pre"}, FORWARD, BACKWARD),
    ],
)  # fmt: skip
def test_variants(changes: dict[str, Any], forward: list[str], backward: list[str]) -> None:
    plan = variant_plan(**changes)
    assert kinds(plan) == (forward, backward)
    assert_no_copies(plan)


def test_what_each_region_reads_and_writes(block_plan: Plan) -> None:
    _, t, d, k = SHAPE
    h = k * d
    f1, f2, f3, f4, f5 = block_plan.forward.regions
    (x,) = [n for n in block_plan.forward.graph.inputs if not isinstance(n.shape[0], int)]
    buffers = block_plan.forward.buffers
    assert x in f1.reads(buffers)
    assert all(x not in r.reads(buffers) for r in (f2, f3, f4, f5))
    assert isinstance(f2, MatmulRegion) and isinstance(f4, MatmulRegion)
    assert [str(e) for e in f2.node.shape] == [str(t), "s0", str(2 * h)]
    assert f2.a.buffer in f1.writes() and f2.a.strides == (d, t * d, 1)  # transposed by stride
    assert f4.a.buffer in f3.writes() and f4.a.strides[2] == 1
    # statistics leave as one float32 a row, the row itself once
    rows = [n for n in f3.writes() if n.shape[-1] == 1]
    assert len(rows) == 4 and {n.dtype for n in rows} == {torch.float32}
    assert len(f3.writes()) == 5 and f2.node in f3.reads(buffers)
    assert {f2.a.buffer, f4.node} <= set(f5.reads(buffers))


def test_finishing_steps_hold_every_bias_and_affine_gradient(block_plan: Plan) -> None:
    assert block_plan.backward is not None
    sums = [
        (region.name, root) for region in block_plan.backward.regions
        if isinstance(region, RowRegion) for root in region.roots if root.kind == "column"
    ]  # fmt: skip
    # norm0, norm1, norm2: two each; norm_x, norm_gate: two each; b1 in two halves, bout
    assert len(sums) == 13
    assert {name for name, _ in sums} == {"B1", "B4", "B7"}
    assert {r.target.dtype for _, r in sums} == {torch.bfloat16}


@pytest.mark.parametrize("changes", [{}, {"without": ("norm2",)}, {"order": "pre"}])
def test_every_refusal_is_a_sentence(changes: dict[str, Any]) -> None:
    plan = variant_plan(**changes)
    found = 0
    for part in directions(plan):
        reasons = list(part.refused)
        for region_name, whys in boundaries(part).items():
            assert all(w.producer == region_name for w in whys)
            reasons += whys
        for why in reasons:
            found += 1
            words = why.reason.split()
            assert len(words) >= 5 and "None" not in words and "Node(" not in why.reason
            assert why.producer and why.consumer and why.producer != why.consumer
    assert found >= 10


def test_explain_names_each_boundary() -> None:
    case = block_case(SHAPE, torch.bfloat16)
    fused = megafuse.fuse(case.module, *case.args)
    text = megafuse.explain(fused, *case.args)
    assert text == megafuse.explain(fused)
    plan = next(iter(fused._plans.values()))[0].plan
    for part in directions(plan):
        assert f"{part.direction}: {len(part.regions)} regions" in text
        for i, region in enumerate(part.regions):
            start = text.index(f"\n  {region.name} ")
            rest = part.regions[i + 1 :]
            end = text.index(f"\n  {rest[0].name} ", start) if rest else len(text)
            paragraph = text[start:end]
            assert region.kind in paragraph and " us" in paragraph
            for later in rest:
                if set(region.writes()) & set(later.reads(part.buffers)):
                    assert re.search(rf"→ (\w+, )*{later.name}\b[^:]*: ", paragraph)
    assert "one operator at a time moves" in text and "Saved for backward" in text


def test_summary_adds_up() -> None:
    b, t, d, k = 256, *SHAPE[1:]
    case = block_case((b, t, d, k), torch.bfloat16)
    fused = megafuse.fuse(case.module, *case.args)
    summary = fused.summary(*case.args)
    assert summary.matmul_flops == 18 * b * t * d * k * d  # three products each way, 2 + 1 wide
    assert summary.fused_bytes == sum(r.bytes_read + r.bytes_written for r in summary.regions)
    assert summary.fused_bytes < 0.6 * summary.unfused_bytes
    assert [r.kind for r in summary.regions] == FORWARD + BACKWARD
    assert len(summary.matmuls) == 6 and all(r.predicted_ms > 0 for r in summary.regions)
    # z, hidden, mm1, out1, the sum before norm1 in bf16 and ten row statistics in float32
    assert summary.saved_bytes == 2 * b * t * (3 * k * d + 3 * d) + 4 * b * t * 10


def digest(plan: Plan) -> str:
    parts = []
    for part in directions(plan):
        for region in part.regions:
            parts.append(f"{region.name} {region.kind} {region.writes()}")
            if isinstance(region, RowRegion):
                parts.append(emit_host(part, region, False).source)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def test_the_planner_is_deterministic() -> None:
    """In one process, and in another with another hash seed: plan and source are the same text."""
    case = block_case(SHAPE, torch.bfloat16)
    first, second = (digest(plan_of(case.module, *case.args)) for _ in range(2))
    assert first == second
    script = (
        "import torch; from test_block_plan import SHAPE, digest, block_case, plan_of;"
        "junk = [object() for _ in range(1234)];"
        "case = block_case(SHAPE, torch.bfloat16); print(digest(plan_of(case.module, *case.args)))"
    )
    paths = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/fusion"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == first


def test_min_memory_has_a_plan_of_its_own() -> None:
    case = block_case(SHAPE)
    plan = plan_of(case.module, *case.args, options=Options(memory="min"))
    assert kinds(plan)[0] == FORWARD
    assert sorted(kinds(plan)[1]).count("matmul") == 4


def test_a_sum_kept_apart_for_rows_inside_a_group_stays_out_of_it() -> None:
    """`x * y` summed over a group's own rows, beside a stage that sums what the group makes."""

    def code(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = torch.where(y < 0, 0.0, x).sum(3)
        return s.sum(0), (x * y).sum(1), s

    x, y = torch.randn(3, 8, 8, 4), torch.randn(3, 8, 8, 4)
    for got, want in zip(megafuse.fuse(code)(x, y), code(x, y), strict=True):
        torch.testing.assert_close(got, want)
    assert kinds(plan_of(code, x, y)) == (["group", "rows"], [])
