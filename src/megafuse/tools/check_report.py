"""The result of a check: printable, and plain data for a JSON file."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megafuse.tools.accuracy import TensorVerdict

_LEGEND = (
    "error: Frobenius norm of the error over that of the float64 value; max/rms: largest error\n"
    "over its root mean square. Each limit follows from eager's figure beside it."
)
_SHOWN = 12  # of the failures, in print; all of them are in `failures` and in the JSON


@dataclass(frozen=True)
class CheckStage:
    """One precision: a verdict a tensor, and what was found about the candidate as a whole.

    `roundoff` is the u of the limits; a finding that starts with "note:" does not fail the check.
    """

    dtype: torch.dtype
    roundoff: float
    seeds: int
    tensors: tuple[TensorVerdict, ...]
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(t.passed for t in self.tensors) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f for f in self.findings if not f.startswith("note:"))

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. `passed` is the verdict; printing it shows every tensor."""

    stages: tuple[CheckStage, ...]

    @property
    def passed(self) -> bool:
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    @property
    def failures(self) -> tuple[str, ...]:
        """One line a tensor that missed: precision, name, reasons."""
        return tuple(self._failures())

    def _failures(self) -> Iterator[str]:
        for stage in self.stages:
            for text in stage.failures:
                yield f"{stage.dtype_name}: {text}"
            for tensor in stage.tensors:
                if tensor.problems:
                    yield f"{stage.dtype_name}: {tensor.name}: {'; '.join(tensor.problems)}"

    @property
    def headline(self) -> str:
        """One line: the verdict and what it rests on."""
        parts = ", ".join(
            f"{len(s.tensors)} tensors x {s.seeds} seed{'s' * (s.seeds != 1)} in {s.dtype_name}"
            for s in self.stages
        )
        return f"{'PASS' if self.passed else 'FAIL'}: {parts}"

    def to_json(self) -> dict[str, Any]:
        """Plain data: every error with its limit. Infinities and NaN become strings."""
        stages = []
        for stage in self.stages:
            tensors = [{**dataclasses.asdict(t), "passed": t.passed} for t in stage.tensors]
            stages.append(
                {
                    "dtype": stage.dtype_name,
                    "unit_roundoff": stage.roundoff,
                    "seeds": stage.seeds,
                    "passed": stage.passed,
                    "findings": list(stage.findings),
                    "tensors": [{k: _plain(v) for k, v in t.items()} for t in tensors],
                }
            )
        return {"passed": self.passed, "stages": stages, "failures": list(self.failures)}

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_stage_table(stage) for stage in self.stages]
        parts.append(Text(_LEGEND, "dim"))
        style = "green" if self.passed else "bold red"
        notes = {f for s in self.stages for f in s.findings if f.startswith("note:")}
        parts += [Text(note, "yellow") for note in sorted(notes)]
        parts += [Text(line, "red") for line in self.failures[:_SHOWN]]
        if len(self.failures) > _SHOWN:
            parts.append(Text(f"... and {len(self.failures) - _SHOWN} more", "red"))
        parts.append(Text(self.headline, style))
        return Group(*parts)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=100, color_system=None).print(self)
        return out.getvalue().rstrip("\n")


def _stage_table(stage: CheckStage) -> Table:
    pooled = stage.seeds > 1
    table = Table(
        title=f"Errors against float64, {stage.dtype_name}, "
        f"{stage.seeds} seed{'s' * (stage.seeds != 1)} (worst seed shown)",
        title_justify="left", title_style="bold", box=None, padding=(0, 1), header_style="dim",
    )  # fmt: skip
    table.add_column("tensor", no_wrap=True)
    for column in ("error", "eager", "limit", "max/rms", "eager", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    if pooled:
        table.add_column("pooled/eager", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for t in stage.tensors:
        values = (
            t.error,
            t.eager_error,
            t.error_limit,
            t.max_error,
            t.eager_max_error,
            t.max_limit,
        )
        row = [t.name + (" *" if t.absolute else ""), *map(_number, values)]
        if pooled:
            row.append(_ratio(t.pooled, t.eager_pooled))
        mark = Text("ok", "green") if t.passed else Text("MISS", "bold red")
        table.add_row(*row, mark)
    if any(t.absolute for t in stage.tensors):
        table.caption = "* zero in theory: errors are relative to the terms that cancel"
        table.caption_justify = "left"
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def _ratio(value: float, base: float) -> str:
    if math.isnan(value):
        return "-"
    if base == 0:
        return "1.000" if value == 0 else "inf"
    return f"{value / base:.3f}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
