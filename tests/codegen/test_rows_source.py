"""The generated source of row regions: readable, traceable to the user's lines, deterministic."""

from __future__ import annotations

import re

import pytest
import torch
from support import block_case, plan_of
from torch import Tensor, nn

import megafuse
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.rows import RowKernel, emit_rows
from megafuse.codegen.schedule import host_schedule
from megafuse.compiler import Plan
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.runtime.built import emit_host
from megafuse.runtime.source import assemble


@pytest.fixture(scope="module")
def plan() -> Plan:
    case = block_case((3, 8, 72, 2), torch.bfloat16)
    return plan_of(case.module, *case.args)


def kernels(plan: Plan, rounding: bool = False) -> dict[str, RowKernel]:
    return {
        region.name: emit_host(part, region, rounding)
        for part in (plan.forward, plan.backward) if part
        for region in part.regions if isinstance(region, RowRegion)
    }  # fmt: skip


def test_every_store_and_sum_names_its_line(plan: Plan) -> None:
    """A line of the program ends in the PyTorch operator and the user's file and line."""
    for kernel in kernels(plan).values():
        lines = [x for x in kernel.source.splitlines()
                 if re.search(r"mf::store<|\.store\(|_acc\.add|_col\.add", x)]  # fmt: skip
        assert len(lines) >= 3
        for line in lines:
            assert re.search(r"// aten\.\w+ (block|ffn)\.py:\d+", line), line


def test_header_says_what_the_region_is(plan: Plan) -> None:
    made = kernels(plan)
    assert made["F1"].source.startswith("// F1: group region\n//   stage 0: ")
    assert made["F3"].source.startswith("// F3: rows region\n")
    assert "rows of 72 elements" in made["F5"].source.splitlines()[1]


def test_source_does_not_depend_on_the_batch() -> None:
    texts = []
    for batch in (1, 3, 8):
        case = block_case((batch, 8, 72, 2), torch.bfloat16)
        made = kernels(plan_of(case.module, *case.args))
        texts.append({name: kernel.source for name, kernel in made.items()})
    assert texts[0] == texts[1] == texts[2]


def test_eager_rounding_rounds_at_operator_boundaries(plan: Plan) -> None:
    default, eager = kernels(plan), kernels(plan, rounding=True)
    for name in default:
        assert default[name].source.count("mf::to_bf16(") == 0
    assert eager["F1"].source.count("mf::to_bf16(") >= 3  # norm0, the residual, norm1
    assert sum(k.source.count("mf::to_bf16(") for k in eager.values()) >= 10


def test_arguments_are_each_buffer_once(plan: Plan) -> None:
    for kernel in kernels(plan).values():
        names = [(a.kind, a.name) for a in kernel.args]
        assert len(names) == len(set(names))
        kinds = {a.kind for a in kernel.args}
        assert {"buffer", "parts", "chunks", "span"} <= kinds
        assert len(kernel.partial_columns) == sum(a.kind == "partial" for a in kernel.args)
        assert (kernel.finish is None) == (not kernel.partial_columns)


@pytest.mark.parametrize("columns", [1, 3, 72, 1280, 5120, 100_003])
def test_schedules_cover_the_row(columns: int) -> None:
    x = torch.zeros(2, columns, dtype=torch.bfloat16, requires_grad=True)
    norm = nn.LayerNorm(columns, dtype=torch.bfloat16)
    plan = plan_of(norm, x)
    for part in (plan.forward, plan.backward):
        assert isinstance(part, GraphPlan)
        for region in part.regions:
            assert isinstance(region, RowRegion)
            for schedule in [host_schedule(region), *cuda_schedules(region, part.rows_of(region))]:
                assert 1 <= schedule.threads <= 1024
                for stage in schedule.stages:
                    assert stage.columns == columns or stage.columns < columns
                    assert schedule.team * stage.steps * stage.lanes >= stage.columns
                    assert stage.columns % stage.lanes == 0 or schedule.team == 1


@pytest.mark.parametrize("columns", [1280, 8192, 32_000, 100_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rings_fit_a_multiprocessor(columns: int, dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(columns, dtype=dtype)
    plan = plan_of(norm, torch.zeros(2, columns, dtype=dtype, requires_grad=True))
    for part in (plan.forward, plan.backward):
        assert isinstance(part, GraphPlan)
        for region in part.regions:
            assert isinstance(region, RowRegion)
            for schedule in cuda_schedules(region, 1 << 20):
                kernel = emit_rows(region, part.buffers, schedule, False, f"mf_{region.name}")
                assert kernel.shared <= 227 * 1024 - 2048
                rings = "mf::ring<" in kernel.source
                assert rings == ("copies();" in kernel.source)
                assert (kernel.shared > 0) == (rings or ".write_block(" in kernel.source)


def test_a_ring_first_read_in_a_later_phase_is_filled_too() -> None:
    """The backward of log_softmax reads the probabilities only after the sum of the gradients."""

    def f(x: Tensor) -> Tensor:
        return torch.log_softmax(x, -1)

    plan = plan_of(f, torch.zeros(2, 4096, dtype=torch.bfloat16, requires_grad=True))
    assert plan.backward is not None
    (region,) = (r for r in plan.backward.regions if isinstance(r, RowRegion))
    schedule = next(s for s in cuda_schedules(region, 1 << 20) if s.depth > 1)
    source = emit_rows(region, plan.backward.buffers, schedule, False, "mf_B1").source
    assert source.count("copies();") == 1 and source.count("mf::ring<") == 2


def test_cuda_and_host_share_one_program(plan: Plan) -> None:
    """Beside the layout the two sources are one text."""
    assert plan.backward is not None
    for part in (plan.forward, plan.backward):
        for region in part.regions:
            if not isinstance(region, RowRegion):
                continue
            host = emit_host(part, region, False)
            schedule = next(cuda_schedules(region, part.rows_of(region)))
            cuda = emit_rows(region, part.buffers, schedule, False, f"mf_{region.name}")
            assert [a.name for a in host.args] == [a.name for a in cuda.args]
            assert host.names == cuda.names
            comments = [re.findall(r"// aten.*", k.source) for k in (host, cuda)]
            assert set(comments[0]) == set(comments[1])


def test_assemble_puts_the_header_in_front(plan: Plan) -> None:
    source = kernels(plan)["F3"].source
    text = assemble(source, "host.h")
    assert text.endswith(source) and '#line 1 "generated"' in text
    assert assemble(text, "host.h") == text


def test_scalars_are_spelled_exactly() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.1).clamp(-1e30, 1e30) + 16777217.0

    x = torch.randn(2, 5)
    (kernel,) = kernels(plan_of(Scale(), x)).values()
    assert "(0.1)" in kernel.source and "16777217.0" in kernel.source
    exact = Scale()(x.double())
    assert (megafuse.fuse(Scale())(x).double() - exact).abs().max() <= 1  # half a step at 2^24


def test_a_view_that_is_stored_and_read_in_one_walk() -> None:
    """An expanded input, flattened, is a tensor of its own; what else reads it looks through it."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.expand(2, 3).flatten()
        return torch.abs(flat), flat

    x = torch.randn(3)
    for got, want in zip(megafuse.fuse(f)(x), f(x), strict=True):
        assert torch.equal(got, want)
