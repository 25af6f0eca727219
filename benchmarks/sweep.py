"""Thirty random shapes of the block beside eager: check, and the median of interleaved samples.

    python benchmarks/sweep.py [--count 30] [--seed 0] [--dtype bf16] [--json PATH]

Shapes are drawn from 1 <= B <= 1024 and 8 <= T <= 64 (log-uniform), 64 <= D <= 1280 with
D % T == 0, and k in {2, 3}. Kernels are built and checked in processes side by side; then all
shapes are timed one after another in this process, a whole step between two events, so that host
time counts where a training loop would wait for it. Exit status 1 when a check failed or a shape is
slower than 0.97x eager.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from megafuse.config import Options
from megafuse.subgraphs import Settings, load
from megafuse.tools.candidate import Candidate
from megafuse.tools.environment import environment
from megafuse.tools.rivals import CANDIDATE, LABELS
from megafuse.tools.timing import Device, interleaved

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEAST = 0.97
Shape = tuple[int, int, int, int]


def shapes(count: int, seed: int) -> list[Shape]:
    """`count` shapes (B, T, D, k), the same for the same seed."""
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    found = []
    while len(found) < count:
        t = between(8, 64)
        d = t * draw.randint(-(-64 // t), 1280 // t)
        found.append((between(1, 1024), t, d, draw.choice((2, 3))))
    return found


def candidate(shape: Shape, dtype: str) -> Candidate:
    settings = Settings(shape, DTYPES[dtype], torch.device("cuda"))
    return Candidate(load("rankmixer", settings), Options())


def checked(job: tuple[Shape, str]) -> tuple[bool, str]:
    """Whether the check of one shape passes, and its one line. Fills the kernel cache."""
    report = candidate(*job).check(seeds=2)
    torch.cuda.empty_cache()
    return report.passed, str(report.headline)


def timed(shape: Shape, dtype: str, samples: int, warmup: int) -> dict[str, Any]:
    ready = candidate(shape, dtype).ready()
    steps = {LABELS["eager"]: ready.step(ready.case.module), CANDIDATE: ready.step(ready.fused)}
    device = Device(torch.device("cuda"))
    taken = interleaved(steps, device, warmup, samples)
    return {name: s.to_json() for name, s in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--samples", type=int, default=31)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drawn = shapes(options.count, options.seed)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        checks = list(pool.map(checked, [(s, options.dtype) for s in drawn]))
    rows: list[dict[str, Any]] = []
    slow = 0
    for shape, (passed, line) in zip(drawn, checks, strict=True):
        times = timed(shape, options.dtype, options.samples, options.warmup)
        torch.cuda.empty_cache()
        eager, ours = (times[n]["median"] for n in (LABELS["eager"], CANDIDATE))
        slow += eager / ours < LEAST
        rows.append({"shape": shape, "passed": passed, "check": line, "times": times})
        print(f"{','.join(map(str, shape)):18} eager {eager:7.3f} ms  megafuse {ours:7.3f} ms  "
              f"{eager / ours:5.2f}x  {'PASS' if passed else line}", flush=True)  # fmt: skip
    failed = sum(not passed for passed, _ in checks)
    print(f"{len(rows)} shapes: {failed} failed the check, {slow} below {LEAST}x eager")
    if options.json:
        record = {"environment": environment(torch.device("cuda")), "dtype": options.dtype,
                  "seed": options.seed, "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1))
    raise SystemExit(bool(failed or slow))


if __name__ == "__main__":
    main()
