"""Compile every kernel of the headline plans for sm_90a with NVRTC, and refuse register spills.

Needs no GPU: modules live on the meta device, so only shapes and dtypes exist. Prints one line a
kernel; exits with status 1 when one spills and is not waived by name.

    python benchmarks/compile_headline.py [--arch sm_90a]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from megafuse import workload
from megafuse.codegen.rows import RowKernel
from megafuse.codegen.schedule import Schedule
from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.runtime.built import emit_cuda
from megafuse.runtime.cuda import Cubin, KernelResources

Case = tuple[tuple[int, int, int, int], torch.dtype]
CASES: tuple[Case, ...] = (
    ((1024, 64, 1280, 2), torch.bfloat16),
    ((1024, 64, 1280, 2), torch.float16),
    ((1024, 64, 1280, 2), torch.float32),
    ((1024, 64, 1280, 3), torch.bfloat16),
)

# "case kernel" → why its spills are accepted, e.g. {"k=3 bfloat16 mf_B4": "..."}.
WAIVED: dict[str, str] = {}


@dataclass(frozen=True)
class Line:
    """One kernel of one case, as the assembler reports it."""

    case: str
    kernel: str
    kind: str
    schedule: str
    used: KernelResources

    @property
    def key(self) -> str:
        return f"{self.case} {self.kernel}"

    @property
    def spills(self) -> int:
        return self.used.spill_stores + self.used.spill_loads


def case_name(case: Case) -> str:
    shape, dtype = case
    return f"k={shape[3]} {str(dtype).removeprefix('torch.')}"


def plan_block(case: Case) -> Plan:
    """The plan of the whole block, forward and backward, from shapes alone."""
    (b, t, d, k), dtype = case
    entry: Any = workload._import(workload.ENTRY)
    block: nn.Module = entry.RankMixerBlockFwd(t, d, k, dtype=dtype, device=torch.device("meta"))
    names = [name for name, _ in block.named_parameters()]
    inputs = torch.empty((b, t, d), dtype=dtype, device="meta", requires_grad=True)

    def function(values: Sequence[torch.Tensor]) -> Any:
        return functional_call(block, dict(zip(names, values)), (values[-1],))

    tensors = [*block.parameters(), inputs]
    parameters = [True] * len(names) + [False]
    halves = case[1] in (torch.bfloat16, torch.float16)  # their products add bias and residual
    return make_plan(
        function, tensors, parameters, [True] * len(tensors), block, Options(), epilogues=halves
    )


def compile_case(case: Case, arch: str = "sm_90a") -> list[Line]:
    """Compile every row region of the case's plan; kernels found in the cache cost nothing."""
    plan = plan_block(case)
    work = [
        (graph, region)
        for graph in (plan.forward, plan.backward)
        if graph is not None
        for region in graph.regions
        if isinstance(region, RowRegion)
    ]

    def build(item: tuple[GraphPlan, RowRegion]) -> tuple[RowRegion, RowKernel, Cubin]:
        graph, region = item
        return region, *emit_cuda(graph, region, False, arch)

    with ThreadPoolExecutor() as pool:
        built = list(pool.map(build, work))
    return [
        Line(case_name(case), name, region.kind, describe(kernel.schedule), cubin.resources[name])
        for region, kernel, cubin in built
        for name in kernel.names
    ]


def describe(schedule: Schedule) -> str:
    """Threads a row x rows a block, and how each stage's row is cut: vectors x lanes."""
    stages = ", ".join(
        f"{s.columns}={schedule.team}x{s.steps}x{s.lanes}{' long' if s.long else ''}"
        for s in schedule.stages
    )
    return f"{schedule.team} threads x {schedule.teams}; {stages}"


def unwaived(lines: Sequence[Line]) -> Iterator[Line]:
    return (line for line in lines if line.spills and line.key not in WAIVED)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    arch = parser.parse_args().arch
    form = "{:<13} {:<13} {:<6} {:<45} {:>5} {:>7} {:>7}"
    print(form.format("case", "kernel", "kind", "schedule", "regs", "spills", "shared"))
    bad: list[Line] = []
    for case in CASES:
        started = time.perf_counter()
        lines = compile_case(case, arch)
        for line in lines:
            finish = line.kernel.endswith("_finish")
            schedule = "32 x 8 threads" if finish else line.schedule
            figures = (line.used.registers, line.spills, line.used.shared_bytes)
            print(form.format(line.case, line.kernel, line.kind, schedule, *figures))
        bad += unwaived(lines)
        seconds = time.perf_counter() - started
        print(f"{len(lines)} kernels for {arch} in {seconds:.1f} s", flush=True)
    for line in bad:
        print(f"{line.key}: {line.spills} bytes of register spills, not waived", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
