"""`megafuse.explain`: a plan in words, or as a page (`tools.plan_page`)."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megafuse.device import DeviceSpec, predicted_for
from megafuse.errors import InputError, OutputError
from megafuse.fusion.describe import summarize
from megafuse.fusion.plan import MatmulRegion, WhyNotFused
from megafuse.fusion.summary import PlanSummary, RegionSummary
from megafuse.tools.tables import counted, gigabytes, operations

WIDTH = 100


@dataclass(frozen=True)
class Explanation:
    """A plan at given run-time sizes. title: what was fused; where: the device it runs on;
    arguments: names of the input buffers that are no parameters of the module."""

    title: str
    where: str
    summary: PlanSummary
    sizes: Mapping[str, int]
    spec: DeviceSpec
    arguments: tuple[str, ...] = ()

    @property
    def rates(self) -> str:
        """What the predicted times rest on, in words."""
        text = f"times predicted for {self.spec.name}, {self.spec.source}"
        return text if self.spec.measured else text + " (`megafuse calibrate` measures yours)"

    def __str__(self) -> str:
        return render(self)

    def html(self) -> str:
        """The same as one page with pictures, self-contained."""
        from megafuse.tools.plan_page import page

        return page(self)


def explain(
    fused: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Explanation:
    """The plan of a call; with no arguments, the plan made last. Raises InputError where there is
    none."""
    if args or kwargs:
        call = fused._call(args, dict(kwargs or {}))
        if call is None:
            raise InputError("this call runs the original module; there is no plan to explain")
        compiled, tensors, _ = call
        sizes = compiled.plan.sizes_of(tensors)
    else:
        plans = [p for same in fused._plans.values() for p in same]
        if not plans:
            raise InputError("no plan yet: call the module, or pass example inputs to explain")
        compiled = plans[-1]
        sizes = compiled.plan.hints
    spec = predicted_for(compiled.device)
    original = fused.original
    names, own = _names(original, compiled.plan)
    summary = summarize(
        compiled.plan, sizes, spec, names, lambda region: _engine(region, sizes, spec)
    )
    name = getattr(original, "__name__", None) or type(original).__name__
    arguments = tuple(f"x{i}" for i in range(own, len(names)))
    return Explanation(name, compiled.device.type, summary, sizes, spec, arguments)


def write_page(explanation: Explanation, path: Path | str) -> None:
    """Write the page to `path`. Raises OutputError when that cannot be written."""
    try:
        Path(path).write_text(explanation.html(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


def _names(original: Any, plan: Any) -> tuple[list[str], int]:
    """The call's flat tensors as the user knows them, and how many are the module's own: parameters
    and buffers by their path, then arguments by position, numbered where that tells no name."""
    total = sum(n.attrs["role"] == "primal" for n in plan.split.forward.inputs)
    module = isinstance(original, nn.Module)
    named = [*original.named_parameters(), *original.named_buffers()] if module else []
    own = [name for name, _ in named][:total]
    try:
        parameters = list(inspect.signature(original.forward if module else original).parameters)
    except (TypeError, ValueError):
        parameters = []
    rest = total - len(own)
    names = own + parameters[:rest]
    return names + [f"argument {i}" for i in range(len(names) - len(own), rest)], len(own)


def _engine(region: MatmulRegion, sizes: Mapping[str, int], spec: DeviceSpec) -> str:
    """What runs a product on `spec`: a tile of our kernel, or torch and why."""
    from megafuse.codegen.matmul import ARCH
    from megafuse.runtime.matmul import Matmul
    from megafuse.runtime.product import product_of

    if spec.arch != ARCH:
        return f"PyTorch's product: the generated kernel is written for {ARCH}"
    return Matmul.choose(product_of(region, sizes), spec.arch, spec.sm_count)


def render(explanation: Explanation) -> str:
    """A paragraph a region, within 100 columns."""
    summary = explanation.summary
    at = ", ".join(f"{k}={v}" for k, v in explanation.sizes.items())
    head = f"megafuse plan of {explanation.title}{f' at {at}' if at else ''}"
    lines = [head, explanation.rates]
    reasons = _Reasons(summary)
    for direction in ("forward", "backward"):
        mine = [r for r in summary.regions if r.direction == direction]
        if not mine:
            continue
        before = sum(o.direction == direction for o in summary.unfused)
        total = sum(r.predicted_ms for r in mine)
        lines += ["", f"{direction}: {counted(len(mine), 'region')} for "
                  f"{counted(before, 'operator')}, "
                  f"{total:.3f} ms predicted"]  # fmt: skip
        for region in mine:
            lines += _paragraph(region, reasons)
    live = summary.live_bytes()
    peak = max(range(len(live)), key=lambda i: live[i], default=None)
    lines += ["", f"moves {gigabytes(summary.fused_bytes)}; one operator at a time moves "
              f"{gigabytes(summary.unfused_bytes)}. "
              f"Saved for backward: {gigabytes(summary.saved_bytes)}."]  # fmt: skip
    if peak is not None:
        lines.append(f"allocates at most {gigabytes(live[peak])}, while "
                     f"{summary.regions[peak].name} runs.")  # fmt: skip
    return "\n".join(lines)


class _Reasons:
    """Sentences in full once, and by a letter from then on."""

    def __init__(self, summary: PlanSummary) -> None:
        said = [w.reason for r in summary.regions for w in (*r.boundaries, *r.tried)]
        said += [r.engine for r in summary.regions]
        often = [s for s in dict.fromkeys(said) if s and said.count(s) > 2]
        self._letters = {s: f"[{chr(ord('a') + i)}]" for i, s in enumerate(often[:26])}
        self._told: set[str] = set()

    def say(self, sentence: str, short: str = "") -> str:
        """`sentence`, or what stands for it; short: how to say it the first time."""
        letter = self._letters.get(sentence)
        if letter is None:
            return short or sentence
        if sentence in self._told:
            return letter
        self._told.add(sentence)
        return f"{short or sentence} {letter}"


def _paragraph(region: RegionSummary, reasons: _Reasons) -> Iterator[str]:
    work = f", {operations(region.flops)}" if region.kind == "matmul" else ""
    head = f"  {region.name:<4}{region.kind:<7} "
    cost = (
        f"reads {gigabytes(region.bytes_read)}, writes {gigabytes(region.bytes_written)}{work}, "
        f"{region.predicted_ms * 1e3:.1f} us"
    )
    places = merged_lines(region)
    only = " ".join(next(iter(places.items()))) if len(places) == 1 else ""
    lines = [head + cost]
    if only and len(head + cost + only) + 2 <= WIDTH:
        lines = [f"{head}{cost}  {only}"]
    else:
        wide = max(map(len, places), default=0)
        for place, ops in places.items():
            lines += _wrapped(f"{place:<{wide}}  {ops}", wide + 2)
    tails = []
    if region.engine:  # the page has the tiles it was compared with
        tails.append(reasons.say(region.engine, region.engine.partition(", predicted")[0]))
    for targets, reason in together(region.boundaries):
        tails.append(f"→ {targets}: {reasons.say(reason)}")
    if not region.boundaries:
        tails.append("→ its results leave the graph")
    for targets, reason in together(region.tried):
        tails.append(f"✗ merging with {targets} refused: {reasons.say(reason)}")
    told = list(_joined(tails))
    if len(lines) == len(told) == 1 and len(lines[0] + told[0].strip()) + 2 <= WIDTH:
        yield f"{lines[0]}  {told[0].strip()}"
    else:
        yield from [*lines, *told]


def _joined(tails: Sequence[str]) -> Iterator[str]:
    """Several on one line where they fit."""
    line = ""
    for tail in tails:
        longer = f"{line}; {tail}" if line else tail
        if line and len(longer) > WIDTH - 7:
            yield from _wrapped(line, 2)
            longer = tail
        line = longer
    if line:
        yield from _wrapped(line, 2)


def merged_lines(region: RegionSummary) -> dict[str, str]:
    """Each line of the user's code once, with the operators that the region computes of it."""
    found: dict[str, list[str]] = {}
    for line in sorted(region.lines, key=lambda x: x.recomputed):
        ops = ", ".join(line.ops)
        found.setdefault(str(line), []).append(f"recomputed: {ops}" if line.recomputed else ops)
    order = dict.fromkeys(map(str, region.lines))
    return {place: "; ".join(found[place]) for place in order}


def together(whys: Sequence[WhyNotFused]) -> Iterator[tuple[str, str]]:
    """Regions that share a reason, and the reason."""
    by_reason: dict[str, list[str]] = {}
    for why in whys:
        by_reason.setdefault(why.reason, []).append(why.consumer)
    for reason, names in by_reason.items():
        yield ", ".join(names), reason


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * 7, subsequent_indent=" " * (7 + indent),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
