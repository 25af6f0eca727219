"""The whole chain on one subgraph: plan, build, check, then throughput and memory beside eager."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megafuse.tools.bench import BenchResult, measure
from megafuse.tools.candidate import Candidate
from megafuse.tools.rivals import CANDIDATE
from megafuse.tools.tables import (
    gigabytes,
    mebibytes,
    milliseconds,
    progress,
    rate,
    ratio,
    table,
    tera,
)


def demo(candidate: Candidate, console: Console, *, seeds: int, samples: int, warmup: int) -> bool:
    """Print everything to `console`; return whether the check passed.

    A candidate that fails its check is not timed.
    """
    console.print(f"[bold]{candidate.subgraph.title}[/bold]\n")
    with progress(console) as update:
        candidate.progress = update
        candidate.make(candidate.seed)
    console.print(candidate.explain(), markup=False)
    console.print()
    with progress(console) as update:
        candidate.progress = None
        report = candidate.check(seeds, update)
    console.print(report)
    if not report.passed:
        console.print("\n[bold red]No timing is shown: the check failed.[/bold red]")
        return False
    with progress(console) as update:
        result = measure(
            candidate.ready(), candidate.subgraph.title, ("eager",), samples=samples,
            warmup=warmup, check=report, progress=update,
        )  # fmt: skip
    console.print()
    console.print(comparison(result))
    for line in result.method:
        if "x floor" not in line:
            console.print(line, style="dim", markup=False)
    return True


def comparison(result: BenchResult) -> Table:
    """Eager and the fused module side by side; the last column says how much less, or faster."""
    eager, fused = result.samples["eager"], result.samples[CANDIDATE]
    made = table("One step, forward + backward", "", "eager", "megafuse", "gain")
    for name in ("mean", "median", "min"):
        before, after = getattr(eager, name), getattr(fused, name)
        shown = [f"{milliseconds(v)} ms" for v in (before, after)]
        made.add_row(f"latency, {name}", *shown, ratio(before / after))
    per_second = [result.samples_per_step / s.mean * 1e3 for s in (eager, fused)]
    gain = ratio(per_second[1] / per_second[0])
    made.add_row("throughput", *[f"{rate(v)} samples/s" for v in per_second], gain)
    if result.matmul_flops:
        flops = [result.matmul_flops / s.mean * 1e3 for s in (eager, fused)]
        made.add_row("matrix-product rate", *map(tera, flops), ratio(flops[1] / flops[0]))
    peaks = [result.peaks.get(name) for name in ("eager", CANDIDATE)]
    if peaks[0] and peaks[1]:
        during = [p.during for p in peaks if p]
        gain = ratio(during[0] / during[1]) if during[1] else "-"
        made.add_row("peak memory of the step", *map(mebibytes, during), gain)
        if peaks[0].resident:
            made.add_row("  resident before it", *[mebibytes(p.resident) for p in peaks if p], "")
    if result.plan:
        moved = [result.plan["unfused_bytes"], result.plan["fused_bytes"]]
        gain = ratio(moved[0] / moved[1]) if moved[1] else "-"
        made.add_row("bytes moved, by the plan", *map(gigabytes, moved), gain)
        made.add_row("  saved for backward", "", gigabytes(result.plan["saved_bytes"]), "")
    made.caption = (
        "bytes moved: tensors each kernel reads and writes once, unfused graph against plan; "
        "1 GB = 10^9 B"
    )
    return made
