"""Measure a fused module beside its rivals in one run, and keep every raw sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megafuse.errors import OutputError
from megafuse.tools.candidate import Ready
from megafuse.tools.check_report import CheckReport
from megafuse.tools.environment import environment, nvidia_smi
from megafuse.tools.rivals import (
    CANDIDATE,
    FLOOR,
    LABELS,
    ORDER,
    PEAKED,
    RivalError,
    build_rival,
)
from megafuse.tools.tables import mebibytes, milliseconds, rate, table
from megafuse.tools.timing import Device, PeakMemory, Samples, interleaved, peak_memory

Progress = Callable[[str, int, int], None]
UNCHECKED = "UNCHECKED: the candidate's numbers were not compared with the reference"
METHOD = (
    "Each sample is one complete step: gradients cleared, forward, backward. All candidates in one",
    "process, round-robin, the order rotating; last-level cache flushed before each, untimed.",
    "{clock}; the first sample of each candidate is recorded but not counted.",
    "x eager, x floor: median over that of eager, of the bare products (below 1 is faster).",
    "Peak: {peak}.",
)
_CLOCK = {
    True: "CUDA events, read after one final synchronisation",
    False: "Host clock (perf_counter)",
}
_PEAK = {
    True: "allocator's highest point in one step less what was resident before it (MiB = 2^20 B)",
    False: "tensors PyTorch allocates in one step (MiB = 2^20 B), not what generated code takes",
}


@dataclass
class BenchResult:
    """Samples and peak memory by candidate label, with all that is needed to read them."""

    title: str
    device: torch.device
    samples_per_step: int
    matmul_flops: int
    samples: dict[str, Samples]
    peaks: dict[str, PeakMemory | None]
    unavailable: tuple[str, ...] = ()
    check: CheckReport | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None

    @property
    def method(self) -> tuple[str, ...]:
        """How the numbers were taken, one sentence an item."""
        cuda = self.device.type == "cuda"
        return tuple(line.format(clock=_CLOCK[cuda], peak=_PEAK[cuda]) for line in METHOD)

    def to_json(self) -> dict[str, Any]:
        """Everything, raw samples included; units are in the names."""
        candidates = {}
        for name, samples in self.samples.items():
            peak = self.peaks.get(name)
            candidates[name] = {
                "time": samples.to_json(),
                "peak_bytes": peak.during if peak else None,
                "resident_bytes": peak.resident if peak else None,
            }
        return {
            "subgraph": self.title,
            "checked": "UNCHECKED" if self.check is None else self.check.to_json(),
            "samples_per_step": self.samples_per_step,
            "matmul_flops": self.matmul_flops,
            "candidates": candidates,
            "unavailable": list(self.unavailable),
            "plan": self.plan,
            "method": list(self.method),
            "settings": self.settings,
            "environment": self.environment,
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.check is None:
            parts.append(
                Text("UNCHECKED: the candidate's numbers were not compared", "bold yellow")
            )
        else:
            parts.append(Text(f"check {self.check.headline}", "green"))
        parts.append(self._table())
        parts += [Text(f"not measured: {line}", "yellow") for line in self.unavailable]
        parts += [Text(line, "dim") for line in self.method]
        return Group(*parts)

    def _table(self) -> Table:
        made = table(
            f"{self.title}, forward + backward, milliseconds",
            *("", "mean", "median", "min", "max"),
            *("samples/s", "TFLOP/s", "peak MiB", "x eager", "x floor"),
        )
        eager, floor = (self.samples.get(name) for name in (LABELS["eager"], FLOOR))
        for name, s in self.samples.items():
            label = name + (" (UNCHECKED)" if name == CANDIDATE and self.check is None else "")
            peak = self.peaks.get(name)
            row = [label, *map(milliseconds, (s.mean, s.median, s.min, s.max))]
            row.append("-" if name == FLOOR else rate(self.samples_per_step / s.mean * 1e3))
            row.append(f"{self.matmul_flops / s.mean / 1e9:.3g}" if self.matmul_flops else "-")
            row.append(mebibytes(peak.during).removesuffix(" MiB") if peak else "-")
            row += [f"{s.median / base.median:.3f}" if base else "-" for base in (eager, floor)]
            made.add_row(*row, style="bold" if name == CANDIDATE else "")
        return made


def measure(
    ready: Ready,
    title: str,
    rivals: tuple[str, ...],
    *,
    samples: int,
    warmup: int,
    check: CheckReport | None,
    progress: Progress,
    settings: dict[str, Any] | None = None,
) -> BenchResult:
    """Build the rivals, take peak memory one by one, then time all of them interleaved.

    `check` is the candidate's passed check; None labels the result UNCHECKED. A rival that cannot
    run is listed as not measured.
    """
    place = ready.grad_outputs[0].device
    device = Device(place)
    summary = ready.summary()
    products = summary.matmuls if summary else ()
    steps: dict[str, Any] = {}
    peaks: dict[str, PeakMemory | None] = {}
    missing: list[str] = []
    # Peaks come before what stays resident: a graph's pool, the operands of the bare products.
    wanted = [name for name in ORDER if name == CANDIDATE or name in rivals]
    for index, name in enumerate(wanted):
        label = LABELS.get(name, name)
        progress(f"preparing {label}", index, len(wanted))
        try:
            step = (
                ready.step(ready.fused) if name == CANDIDATE else build_rival(name, ready, products)
            )
        except RivalError as error:
            missing.append(str(error))
            continue
        if name in PEAKED:
            peaks[label] = peak_memory(step, ready.clear, device)
        steps[label] = step
    record = environment(place)
    timed = interleaved(
        steps, device, warmup, samples, lambda done, total: progress("timing", done, total)
    )
    ready.clear()
    if record.get("gpu"):
        record["gpu"]["nvidia_smi_after"] = nvidia_smi(place)
    taken = {"samples": samples, "warmup": warmup, "flush_bytes": device.flush_bytes}
    return BenchResult(
        title=title,
        device=place,
        samples_per_step=ready.case.samples,
        matmul_flops=summary.matmul_flops if summary else 0,
        samples=timed,
        peaks=peaks,
        unavailable=tuple(missing),
        check=check,
        environment=record,
        settings={**(settings or {}), **taken},
        plan=plan_json(summary),
    )


def plan_json(summary: Any) -> dict[str, Any] | None:
    """The plan's own figures as plain data, bytes and operations."""
    if summary is None:
        return None
    return {
        "fused_bytes": summary.fused_bytes,
        "unfused_bytes": summary.unfused_bytes,
        "saved_bytes": summary.saved_bytes,
        "matmul_flops": summary.matmul_flops,
        "regions": [
            {
                "name": r.name,
                "direction": r.direction,
                "kind": r.kind,
                "ops": list(r.ops),
                "bytes_read": r.bytes_read,
                "bytes_written": r.bytes_written,
                "flops": r.flops,
                "predicted_ms": r.predicted_ms,
                "launches": r.launches,
                "kernels": list(r.kernels),
            }
            for r in summary.regions
        ],
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data` to `path`, creating its folder. Raises OutputError when that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
