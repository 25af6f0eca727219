"""Row kernels of a plan, one by one: time and fraction of the measured copy bandwidth.

    python benchmarks/rows.py [--shape B,T,D,k] [--dtype bf16] [--sweep] [--json PATH]

Each kernel runs on random data with the L2 flushed before every launch; the median of the samples
is kept. Bytes: every tensor that a region reads or writes counted once, less what its kernel keeps
in shared memory. With --sweep
every layout that does not spill is timed, which is how the defaults in `codegen/candidates.py` were
found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import megafuse
from megafuse.codegen.candidates import SUMS
from megafuse.codegen.fit import layouts_of, summed, with_shelf
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import Schedule, StageSchedule, columns_of
from megafuse.codegen.turn import ROOM
from megafuse.fusion.describe import read_bytes, written_bytes
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.fusion.walks import kept_axes
from megafuse.ir import evaluate
from megafuse.runtime.built import BuiltRegion, blocks_per_sm
from megafuse.runtime.cuda import CudaModule, compile_cubin
from megafuse.runtime.executor import Executor
from megafuse.subgraphs import Settings, load
from megafuse.tools.environment import environment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def timed(step: Callable[[], None], samples: int = 11) -> list[float]:
    """Milliseconds of `samples` launches, each after an L2 flush."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    events = []
    for _ in range(samples + 2):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in events[2:]]


def copy_bandwidth() -> float:
    """Bytes/s of a large device-to-device copy, reads and writes counted."""
    a = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    ms = statistics.median(timed(lambda: b.copy_(a)))
    return 2 * a.numel() * 2 / (ms * 1e-3)


def inputs_of(plan: GraphPlan, region: RowRegion, sizes: dict[str, int]) -> dict[Any, torch.Tensor]:
    values = {}
    for node in region.reads(plan.buffers):
        shape = [evaluate(d, sizes) for d in node.shape]
        # Row statistics such as rstd are positive; harmless for the rest.
        values[node] = (torch.rand(shape, device="cuda") + 0.5).to(node.dtype)
    return values


def layouts(region: RowRegion) -> list[Schedule]:
    """Layouts worth timing: near-exact divisions of the row, every way of getting it there; of a
    group those with a shelf, where one fits."""
    found = [s for plain, pin in shelf_layouts(region)
             if (s := with_shelf(region, plain, pin)) is not None]  # fmt: skip
    if found:
        return list(dict.fromkeys(found))
    for lanes, team in itertools.product((8, 4), (32, 64, 128, 160, 320)):
        stages = []
        for stage in region.stages:
            n = columns_of(stage)
            steps = -(-(n // lanes) // team)
            if n % lanes or team * steps * lanes > 1.21 * n or steps * lanes > 48:
                break
            stages.append(StageSchedule(n, lanes, steps, False))
        if len(stages) < len(region.stages):
            continue
        ways = [(depth, lazy, True) for depth in (2, 3, 4) for lazy in (False, True)]
        ways += [(0, False, True), (0, False, False)]
        both = True, False
        turns = both if kept_axes(region) else (True,)
        for teams, (depth, lazy, ahead), hold, in_turn in itertools.product(
            (1, 2, 4, 8), ways, both, turns
        ):
            if 128 <= team * teams <= 320:
                found.append(Schedule(team, teams, tuple(stages), 1, depth, lazy, ahead, hold,
                                      in_turn=in_turn))  # fmt: skip
    return found


def shelf_layouts(region: RowRegion) -> Iterator[tuple[Schedule, bool]]:
    """(layout, whether small tensors lie unpacked beside the shelf): up to four blocks of four
    warps on a multiprocessor, or eight to twenty warps in one, vectors of both widths, one row or
    more ahead, parameters in registers or not."""
    if region.kind != "group":
        return
    columns = any(r.kind == "column" for r in region.roots)
    for (team, threads), lanes in itertools.product(
        ((16, 128), (32, 128), (64, 128), (32, 256), (32, 384), (32, 512), (64, 256), (64, 320),
         (64, 384), (64, 512), (160, 320), (160, 480), (160, 640)), (8, 4),
    ):  # fmt: skip
        stages = layouts_of(region, team, lanes)
        exact = all(team * x.steps * x.lanes <= 1.21 * x.columns for x in stages)
        crowded = team == 160 and not columns  # too many threads for a row
        if not exact or crowded or summed(region, stages) > SUMS or any(x.long for x in stages):
            continue
        for depth, hold, early, pin in (
            (4, True, True, True), (4, False, True, True), (4, True, True, False),
            (2, True, True, True), (2, False, True, True), (2, True, False, True),
        ):  # fmt: skip
            for blocks in (4, 3, 2) if threads == 128 else (2, 1) if threads == 256 else (1,):
                yield Schedule(team, threads // team, stages, blocks, depth, hold=hold,
                               early=early), pin  # fmt: skip


def _compile(job: tuple[str, list[str], str, bool]) -> Any:
    source, names, arch, fast = job
    try:
        return compile_cubin(source, names, arch, fast=fast)
    except megafuse.MegafuseError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1024,64,1280,2")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--regions", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = tuple(int(s) for s in options.shape.split(","))
    settings = Settings(shape, DTYPES[options.dtype], torch.device("cuda"))
    case = load("rankmixer", settings).case(0)
    compiled = megafuse.fuse(case.module).build(*case.args, **case.kwargs)
    assert compiled is not None and compiled.forward is not None
    sizes = {"s0": shape[0]}
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for executor in (compiled.forward, compiled.backward):
        assert executor is not None
        for region in executor.plan.regions:
            if not isinstance(region, RowRegion):
                continue
            if options.regions and region.name not in options.regions.split(","):
                continue
            rows += measure(executor, region, sizes, bandwidth, options.sweep)
    if options.json:
        record = {"environment": environment(torch.device("cuda")), "shape": shape,
                  "dtype": options.dtype, "copy": bandwidth, "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, default=str, indent=1))


def measure(
    executor: Executor, region: RowRegion, sizes: dict[str, int], bandwidth: float, sweep: bool
) -> list[dict[str, Any]]:
    plan = executor.plan
    nbytes = sum(read_bytes(region, n, plan.buffers, sizes) for n in region.reads(plan.buffers))
    nbytes += written_bytes(region, sizes)
    values = inputs_of(plan, region, sizes)
    candidates: list[tuple[str, BuiltRegion]] = [("chosen", executor.kernel(region, sizes))]
    if sweep:
        kernels = [emit_rows(region, plan.buffers, s, False, f"mf_{region.name}")
                   for s in layouts(region)]  # fmt: skip
        jobs = [(k.source, k.names, executor.spec.arch, k.fast) for k in kernels]
        with ProcessPoolExecutor(14) as pool:
            cubins = list(pool.map(_compile, jobs))
        for kernel, cubin in zip(kernels, cubins, strict=True):
            if cubin is None or any(r.spill_loads for r in cubin.resources.values()):
                continue
            if kernel.shared > ROOM:
                continue
            shared = {kernel.name: kernel.shared}
            module = CudaModule(cubin, kernel.names, torch.cuda.current_device(), shared)
            built = BuiltRegion(region, kernel, module, blocks_per_sm(kernel, cubin, executor.spec))
            candidates.append(("sweep", built))
    results = []
    for kind, built in candidates:
        step = executor._row_step(built, sizes)
        # What stays in shared memory is written and read by nobody.
        inside = sum(evaluate(n.type.nbytes, sizes) for n in built.kernel.inside)
        samples = timed(lambda step=step: step(dict(values)), 9 if sweep else 21)
        ms = statistics.median(samples)
        s = built.kernel.schedule
        layout = (f"team {s.team}x{s.teams} lanes {','.join(str(x.lanes) for x in s.stages)} "
                  f"blocks {s.blocks}/{built.blocks_per_sm} depth {s.depth}"
                  f"{' lazy' if s.lazy else ''}{'' if s.ahead else ' now'}"
                  f"{'' if s.hold else ' reread'}{'' if s.in_turn else ' spans'}"
                  f"{f' pinned {len(s.pinned)}' if s.pinned else ''}"
                  f"{'' if s.early else ' late'}")  # fmt: skip
        cubin = built.module.cubin  # type: ignore[union-attr]
        registers = cubin.resources[built.kernel.name].registers
        results.append({"region": region.name, "kind": kind, "layout": layout, "ms": ms,
                        "registers": registers, "bytes": nbytes - inside,
                        "fraction": (nbytes - inside) / (ms * 1e-3) / bandwidth,
                        "samples": samples})  # fmt: skip
    best = sorted(results, key=lambda r: r["ms"])
    for r in [x for x in results if x["kind"] == "chosen"] + best[:6]:
        print(f"{r['region']:4}{r['kind']:7}{r['layout']:72}{r['registers']:4} regs "
              f"{r['ms']:.4f} ms {r['bytes'] / r['ms'] / 1e9:.2f} TB/s "
              f"{100 * r['fraction']:.0f} % of copy")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
