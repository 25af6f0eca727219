"""The `megafuse` command. PyTorch is imported when a command runs, so that --help is instant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megafuse.tools.cli_options import Cli, Common, F, common, traceback_option

if TYPE_CHECKING:
    from rich.console import Console

    from megafuse.tools.candidate import Candidate, Ready
    from megafuse.tools.check_report import CheckReport

SUBGRAPHS = """
SUBGRAPH is rankmixer (the default), dense_ffn, zoo:NAME (`megafuse coverage` lists them),
path/to/file.py:factory (a function that returns a module and its example inputs) or an exported
program.pt2.
"""
_JSON = click.Path(dir_okay=False, path_type=Path)
_SEEDS = click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Seeds to check; from 8 on their pooled error is judged too.",
)
_NO_CHECK = click.option(
    "--no-check", is_flag=True, help="Skip the check; the output is labelled UNCHECKED."
)


def _samples(samples: int, warmup: int) -> Callable[[F], F]:
    def add(command: F) -> F:
        for name, default, least, text in (
            ("--warmup", warmup, 0, "Untimed steps of each."),
            ("--samples", samples, 1, "Timed steps of each; the first is not counted."),
        ):
            kind = click.IntRange(min=least)
            command = click.option(name, type=kind, default=default, show_default=True, help=text)(
                command
            )
        return command

    return add


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]}, epilog=SUBGRAPHS)
@click.version_option(package_name="megafuse")
def main() -> None:
    """Turn a PyTorch subgraph into a few generated kernels, and prove them against eager."""


@main.command(epilog=SUBGRAPHS)
@_SEEDS
@_samples(samples=21, warmup=3)
@common
def demo(common: Common, seeds: int, samples: int, warmup: int) -> None:
    """Fuse SUBGRAPH, check outputs and gradients, show throughput, memory and traffic."""
    from megafuse.tools.demo import demo as run
    from megafuse.tools.tables import console

    passed = run(common.candidate(), console(), seeds=seeds, samples=samples, warmup=warmup)
    if not passed:
        raise SystemExit(1)


@main.command(epilog=SUBGRAPHS)
@click.option(
    "--html",
    type=_JSON,
    metavar="FILE",
    help="Also write it as one self-contained page: the graph before and after, buffers and "
    "their lifetimes.",
)
@common
def explain(common: Common, html: Path | None) -> None:
    """Print the plan for SUBGRAPH: regions, the reason for each boundary, bytes, predicted time."""
    click.echo(common.candidate().explain(html))
    if html:
        click.echo(f"page: {html}", err=True)


@main.command(epilog=SUBGRAPHS)
@_SEEDS
@click.option("--json", "json_path", type=_JSON, help="Also write every figure to this file.")
@common
def check(common: Common, seeds: int, json_path: Path | None) -> None:
    """Compare output and every gradient with eager and float64; exit status 1 on a miss.

    A bfloat16 or float16 check is repeated in float32, where faults cannot hide behind rounding.
    """
    from megafuse.tools.bench import write_json
    from megafuse.tools.tables import console

    out, candidate = console(), common.candidate()
    out.print(f"[bold]{candidate.subgraph.title}[/bold]")
    report = _checked(candidate, out, seeds)
    out.print(report)
    if json_path:
        from megafuse.tools.environment import environment

        device = candidate.ready().grad_outputs[0].device
        record = {"subgraph": candidate.subgraph.title, "check": report.to_json()}
        settings = {**common.to_json(), "seeds": seeds}
        write_json(json_path, {**record, "settings": settings, "environment": environment(device)})
    if not report.passed:
        raise SystemExit(1)


@main.command(epilog=SUBGRAPHS)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@common
def bisect(common: Common, seeds: int) -> None:
    """Find the first fusion that makes the check fail; exit status 1 when it fails.

    Searches over MEGAFUSE_FUEL, the number of fusions a plan may hold.
    """
    from megafuse.tools.bisect import bisect as search
    from megafuse.tools.tables import console, progress

    out, candidate = console(), common.candidate()
    out.print(f"[bold]{candidate.subgraph.title}[/bold]")
    with progress(out) as update:
        finding = search(candidate, seeds, update)
    click.echo(finding)
    if not finding.passed:
        raise SystemExit(1)


@main.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--json", "json_path", type=_JSON, help="Also write the rates to this file.")
@traceback_option
def calibrate(device: str, json_path: Path | None) -> None:
    """Measure this device's rates once and keep them in the cache: predictions then use them.

    Copy bandwidth out of memory and cache, the time of a launch, the rate of a matrix product.
    """
    import torch

    from megafuse.tools import calibrate as tool
    from megafuse.tools.bench import write_json
    from megafuse.tools.cli_options import device_kind
    from megafuse.tools.environment import environment
    from megafuse.tools.tables import console, progress

    chosen, out = torch.device(device_kind(device)), console()
    with progress(out) as update:
        rates, path = tool.calibrate(chosen, update)
    out.print(tool.comparison(rates, chosen))
    out.print(f"kept in {path}; explain and profile predict with them from now on", markup=False)
    if json_path:
        write_json(json_path, {"rates": rates.to_json(), "environment": environment(chosen)})


@main.command(epilog=SUBGRAPHS)
@click.option(
    "--rivals",
    help="Comma-separated: eager, compile, graphed, products. Default: all on a GPU, eager and "
    "products on a CPU.",
)
@click.option(
    "--json",
    "json_path",
    type=_JSON,
    help="Write raw samples and the environment to this file; without it nothing is written.",
)
@_NO_CHECK
@_samples(samples=51, warmup=5)
@common
def bench(
    common: Common,
    rivals: str | None,
    json_path: Path | None,
    no_check: bool,
    samples: int,
    warmup: int,
) -> None:
    """Time SUBGRAPH fused beside its rivals, interleaved in one run.

    A one-seed check comes first: a candidate that fails it is not timed, and the exit status is 1.
    """
    from megafuse.tools.bench import measure, write_json
    from megafuse.tools.rivals import parse_rivals
    from megafuse.tools.tables import console, progress

    out, candidate = console(), common.candidate()
    chosen = parse_rivals(rivals, candidate.subgraph.settings.device)
    report, ready = _ready(candidate, out, no_check)
    with progress(out) as update:
        result = measure(
            ready, candidate.subgraph.title, chosen, samples=samples, warmup=warmup, check=report,
            progress=update, settings=common.to_json(),
        )  # fmt: skip
    out.print(result)
    if json_path:
        write_json(json_path, result.to_json())
        out.print(f"raw samples: {json_path}", markup=False)


@main.command(epilog=SUBGRAPHS)
@click.option("--ncu", is_flag=True, help="Count DRAM bytes with Nsight Compute (needs a GPU).")
@_NO_CHECK
@click.option("--one-step", is_flag=True, hidden=True)
@common
def profile(common: Common, ncu: bool, no_check: bool, one_step: bool) -> None:
    """Show where a fused step's time and bytes go, by kernel and by region, beside the plan."""
    from megafuse.tools import profile as tool
    from megafuse.tools.ncu import ProfileError, measure_bytes
    from megafuse.tools.tables import console, mebibytes, progress
    from megafuse.tools.timing import Device, peak_memory

    out, candidate = console(), common.candidate()
    # A kernel that starts early would show the wait for its predecessor as time of its own.
    candidate.options = replace(candidate.options, serial=True)
    device = candidate.subgraph.settings.device
    if (ncu or one_step) and device.type != "cuda":
        raise ProfileError("--ncu reads a GPU's counters: it needs --device cuda")
    if one_step:
        tool.one_step(candidate.ready())
        return
    report, ready = _ready(candidate, out, no_check)
    out.print(f"[bold]{candidate.subgraph.title}[/bold]")
    if report is None:
        out.print("UNCHECKED: the candidate's numbers were not compared", style="bold yellow")
    plan = ready.summary()
    with progress(out) as update:
        update("profiling", 0, 2)
        step, clock = ready.step(ready.fused), Device(device)
        times = tool.kernel_times(step, clock.is_cuda, plan)
        peak = peak_memory(step, ready.clear, clock)
        update("counting bytes", 1, 2)
        counted = measure_bytes(["profile", *common.arguments(), "--one-step"]) if ncu else []
    out.print(tool.kernel_table(times, counted))
    if plan:
        out.print(tool.region_table(times, plan, counted))
    if peak:
        out.print(f"Peak memory of the step {mebibytes(peak.during)}", markup=False)
    out.print(tool.method(clock.is_cuda, bool(counted)), style="dim", markup=False)


@main.command(epilog=SUBGRAPHS)
@click.option("--warmup", type=click.IntRange(min=0), default=5, show_default=True)
@click.option("--num-tests", type=click.IntRange(min=1), default=20, show_default=True)
@_NO_CHECK
@common
def workload(common: Common, warmup: int, num_tests: int, no_check: bool) -> None:
    """Time SUBGRAPH fused with the workload package's own timing utility, in its line format.

    SUBGRAPH is rankmixer or dense_ffn. The unchanged block is timed after it in the same way.
    """
    from megafuse import workload as package
    from megafuse.subgraphs import SubgraphError, WorkloadSubgraph
    from megafuse.tools.tables import console

    candidate = common.candidate()
    subgraph = candidate.subgraph
    if not isinstance(subgraph, WorkloadSubgraph):
        raise SubgraphError(f"{subgraph.name} does not come from the workload package")
    report, ready = _ready(candidate, console(stderr=True), no_check)
    prefix = "" if report else "UNCHECKED "
    for label, target in (("megafuse", ready.fused), ("reference", ready.case.module)):
        header, line, _ = package.runner_lines(
            f"{prefix if label == 'megafuse' else ''}{label} {subgraph.name}", subgraph.shape,
            subgraph.dtype, subgraph.settings.device, ready.step(target), tf32=common.tf32,
            warmup=warmup, num_tests=num_tests, seed=common.seed,
        )  # fmt: skip
        click.echo(header)
        click.echo(line)


@main.command()
@click.option("--only", help="Comma-separated entries; the table then holds no others.")
@click.option("--out", type=_JSON, help="Write the table to this file, docs/coverage.md say.")
@click.option(
    "--speeds",
    type=_JSON,
    help="File of raw samples: read when it is there, and with a GPU measured into.",
)
@_samples(samples=21, warmup=5)
@traceback_option
def coverage(
    only: str | None, out: Path | None, speeds: Path | None, samples: int, warmup: int
) -> None:
    """Regions, operators and bytes of every subgraph of the zoo, and on a GPU their speed.

    Exit status 1 when less than nine tenths of the bytes that could be fused are.
    """
    from megafuse.tools.coverage import run
    from megafuse.tools.tables import console, progress

    names = only.split(",") if only else None
    with progress(console(stderr=True)) as update:
        text, enough = run(names, speeds, samples, warmup, update)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    if not enough:
        raise SystemExit(1)


@main.command()
@traceback_option
def doctor() -> None:
    """Say what this machine can run, what is missing for the rest, and the way out."""
    from rich.text import Text

    from megafuse.tools.doctor import abilities, examine
    from megafuse.tools.tables import console

    out, findings = console(), examine()
    for f in findings:
        mark = Text("  ok  ", "green") if f.ok else Text("  --  ", "yellow")
        out.print(mark + Text(f"{f.name:<18}", "default") + Text(f.found, "dim"))
        if not f.ok:
            out.print(Text(f"      {'':<18}for {f.needed_for}: {f.way_out}", "yellow"))
    out.print("\n[bold]This machine can[/bold]")
    for what, able in abilities(findings):
        out.print(Text("  yes " if able else "  no  ", "green" if able else "yellow") + Text(what))


def _checked(candidate: Candidate, out: Console, seeds: int) -> CheckReport:
    from megafuse.tools.tables import progress

    with progress(out) as update:
        candidate.progress = update
        candidate.make(candidate.seed)
        candidate.progress = None
        return candidate.check(seeds, update)


def _ready(candidate: Candidate, out: Console, no_check: bool) -> tuple[CheckReport | None, Ready]:
    """The candidate after a one-seed check; exit status 1, with the report, when that fails."""
    report = None
    if not no_check:
        report = _checked(candidate, out, 1)
        if not report.passed:
            out.print(report)
            out.print("No timing is shown: the check failed.", style="bold red")
            raise SystemExit(1)
    return report, candidate.ready()
