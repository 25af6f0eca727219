"""Where a fused step's time and bytes go, kernel by kernel, beside the plan's own figures."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from megafuse.tools.candidate import Ready
from megafuse.tools.ncu import KernelBytes
from megafuse.tools.tables import gigabytes, milliseconds, table

if TYPE_CHECKING:
    from megafuse.fusion.summary import PlanSummary, RegionSummary

OUTSIDE = "(outside the plan)"


@dataclass(frozen=True)
class KernelTime:
    """A kernel or host operator: its region, milliseconds and calls of one step."""

    name: str
    region: str
    milliseconds: float
    calls: float


def kernel_times(
    step: Callable[[], object], cuda: bool, plan: PlanSummary | None, repeats: int = 5
) -> list[KernelTime]:
    """Self time a step of everything PyTorch's profiler saw, longest first.

    CUDA: device time of kernels. CPU: host time of operators and of ranges that generated code
    records. An entry belongs to the region that names it, else to the one inside whose recorded
    range it ran. Averages over `repeats` steps after one warm-up; the cache is not flushed.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    step()
    with profile(activities=activities) as profiler:
        for _ in range(repeats):
            step()
        if cuda:
            torch.cuda.synchronize()
    regions = plan.regions if plan else ()
    entries = _device_entries if cuda else _host_entries
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, region, microseconds in entries(profiler.events() or [], regions):
        total = sums[name, region]
        total[0] += microseconds
        total[1] += 1
    times = [
        KernelTime(name, region, total / repeats / 1e3, count / repeats)
        for (name, region), (total, count) in sums.items()
    ]
    return sorted(times, key=lambda k: -k.milliseconds)


Entries = Iterator[tuple[str, str, float]]


def _host_entries(events: Iterable[Any], regions: Sequence[RegionSummary]) -> Entries:
    for event in events:
        if not _on_device(event) and event.self_cpu_time_total > 0:
            yield event.name, _enclosing(event, regions), event.self_cpu_time_total


def _device_entries(events: Iterable[Any], regions: Sequence[RegionSummary]) -> Entries:
    """Every launch once, under the region its name says, or that ran when it was launched.

    A launch, not a kernel's name: several products share a kernel. Newer versions of PyTorch also
    report the ranges recorded on the host as events of the device, spanning what was launched
    inside them; those are left out.
    """
    events = list(events)
    host = [e for e in events if not _on_device(e)]
    ranges = {e.name for e in host}
    launch = _Launches(host, regions)
    for event in events:
        if not _on_device(event) or event.self_device_time_total <= 0:
            continue
        if getattr(event, "is_user_annotation", False) or event.name in ranges:
            continue
        region = region_of(event.name, regions)
        if region == OUTSIDE:
            region = launch.region(event)
        yield event.name, region, event.self_device_time_total


class _Launches:
    """Which region launched a kernel, from the events of the host."""

    def __init__(self, host: Sequence[Any], regions: Sequence[RegionSummary]) -> None:
        names = {r.name for r in regions}
        # A call of the CUDA runtime or driver has the number of the kernel that it launched.
        self._calls = {e.id: e for e in host if e.name.startswith("cu")}
        self._ranges = [(e.time_range, e.name) for e in host if e.name in names]
        # PyTorch ties a kernel to an operator by name and duration alone; equal ones may swap.
        self._operators: dict[tuple[str, float], list[str]] = defaultdict(list)
        for event in host:
            for kernel in event.kernels:
                owner = _enclosing(event, regions)
                self._operators[kernel.name, kernel.duration].append(owner)

    def region(self, event: Any) -> str:
        """By the time of the call: inside autograd a kernel is tied to the whole backward, of which
        a region's range is a part."""
        span = event.time_range
        owners = self._operators.get((event.name, span.end - span.start))
        by_operator = owners.pop() if owners else OUTSIDE
        call = self._calls.get(event.id)
        if call is not None:
            for during, name in self._ranges:
                if during.start <= call.time_range.start <= during.end:
                    return name
        return by_operator


def _on_device(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def _enclosing(event: Any, regions: Sequence[RegionSummary]) -> str:
    while event is not None:
        region = region_of(event.name, regions)
        if region != OUTSIDE:
            return region
        event = event.cpu_parent
    return OUTSIDE


def region_of(kernel: str, regions: Sequence[RegionSummary]) -> str:
    """The regions a kernel belongs to, "F1" or "F1, B7"; OUTSIDE when there is none.

    A region names its kernels; a profiler shows them demangled, with arguments, or as a range.
    """
    owners = []
    for region in regions:
        for name in (region.name, *region.kernels):
            if re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", kernel):
                owners.append(region.name)
                break
    return ", ".join(owners) or OUTSIDE


def by_region(times: Sequence[KernelTime]) -> dict[str, float]:
    """Milliseconds a step for each region, kernels outside the plan under OUTSIDE."""
    totals: dict[str, float] = defaultdict(float)
    for item in times:
        totals[item.region] += item.milliseconds
    return dict(totals)


def kernel_table(
    times: Sequence[KernelTime],
    counted: Sequence[KernelBytes] = (),
    rows: int = 25,
) -> Table:
    """One row a kernel: its region, calls, time and, where counted, its DRAM bytes."""
    columns = ["kernel", "region", "calls", "ms", "share"]
    if counted:
        columns += ["DRAM read", "DRAM written", "TB/s"]
    made = table("Kernels of one step", *columns)
    total = sum(t.milliseconds for t in times) or 1.0
    bytes_of = _sum_by_name(counted)
    for item in times[:rows]:
        cells = [_shortened(item.name, 34 if counted else 52)]
        cells += [item.region]
        cells += [f"{item.calls:g}", milliseconds(item.milliseconds)]
        cells.append(f"{100 * item.milliseconds / total:.1f}%")
        if counted:
            found = bytes_of.get(_key(item.name))
            cells += _traffic(found)
        made.add_row(*cells)
    if len(times) > rows:
        rest = sum(t.milliseconds for t in times[rows:])
        made.add_row(
            f"{len(times) - rows} more", "", "", milliseconds(rest), f"{100 * rest / total:.1f}%"
        )
    made.add_row("all", "", "", milliseconds(total), "100.0%", style="bold")
    return made


def region_table(
    times: Sequence[KernelTime], plan: PlanSummary, counted: Sequence[KernelBytes] = ()
) -> Table:
    """One row a region: time beside the prediction, DRAM bytes beside the plan's."""
    columns = ["region", "kind", "ms", "predicted", "plan read", "plan written", "plan TB/s"]
    if counted:
        columns += ["DRAM bytes", "DRAM/plan"]
    made = table("Regions of one step", *columns)
    measured = by_region(times)
    dram: dict[str, float] = defaultdict(float)
    for kernel in counted:
        dram[region_of(kernel.name, plan.regions)] += kernel.read + kernel.written
    shared = {name for name in measured if "," in name}
    for region in plan.regions:
        owner = next((s for s in shared if region.name in s.split(", ")), region.name)
        taken = measured.get(owner)
        moved = region.bytes_read + region.bytes_written
        cells = [region.name, region.kind]
        cells.append(milliseconds(taken) + ("*" if owner in shared else "") if taken else "-")
        cells += [milliseconds(region.predicted_ms), gigabytes(region.bytes_read)]
        cells.append(gigabytes(region.bytes_written))
        cells.append(f"{moved / taken / 1e9:.2f}" if taken and owner not in shared else "-")
        if counted:
            total = dram.get(owner)
            cells.append(gigabytes(total) if total else "-")
            cells.append(f"{total / moved:.2f}" if total and moved and owner not in shared else "-")
        made.add_row(*cells)
    outside = measured.get(OUTSIDE, 0.0)
    made.add_row(OUTSIDE, "", milliseconds(outside), "", "", "", "")
    moved = sum(r.bytes_read + r.bytes_written for r in plan.regions)
    made.caption = f"plan {gigabytes(moved)} a step, unfused graph {gigabytes(plan.unfused_bytes)}"
    if shared:
        made.caption += "; * one kernel serves several regions: its time is their sum"
    return made


def one_step(ready: Ready) -> None:
    """Warm up, then bracket one fused step with cudaProfilerStart/Stop for an outer profiler."""
    step = ready.step(ready.fused)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart
    runtime = cudart()
    runtime.cudaProfilerStart()
    step()
    torch.cuda.synchronize()
    runtime.cudaProfilerStop()


def _sum_by_name(counted: Sequence[KernelBytes]) -> dict[str, KernelBytes]:
    sums: dict[str, KernelBytes] = {}
    for k in counted:
        key = _key(k.name)
        old = sums.get(key, KernelBytes(k.name, 0.0, 0.0, 0.0))
        sums[key] = KernelBytes(
            k.name, old.read + k.read, old.written + k.written, old.milliseconds + k.milliseconds
        )
    return sums


def _key(name: str) -> str:
    """A kernel's bare name: what two tools that print it differently have in common."""
    bare = re.sub(r"^(void|static|inline)\s+", "", name)
    return re.split(r"[<(]", bare)[0].strip().split("::")[-1]


def _traffic(found: KernelBytes | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    speed = (found.read + found.written) / found.milliseconds / 1e9 if found.milliseconds else 0.0
    return [gigabytes(found.read), gigabytes(found.written), f"{speed:.2f}"]


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def method(cuda: bool, counted: bool) -> str:
    """How the tables were taken, and what this machine could not add."""
    if not cuda:
        return (
            "Host time of PyTorch operators and of ranges generated code records, mean of 5 steps, "
            "caches warm. Bytes are the plan's own: each region's tensors once. Device time and "
            "DRAM bytes need a GPU (--device cuda, --ncu)."
        )
    text = (
        "Device time from PyTorch's profiler, mean of 5 steps, caches as the step leaves them, one "
        "kernel after the other. "
        "Plan bytes: each region's tensors once."
    )
    if counted:
        text += (
            " DRAM bytes: dram__bytes_read.sum and dram__bytes_write.sum of Nsight Compute, "
            "kernels replayed one by one, cold L2, free clocks; TB/s against its own times."
        )
    return text
