"""Time and peak memory of several candidates, interleaved in one process.

The measured call is the brief's: clear the inputs' gradients, zero_grad(set_to_none=True), forward,
backward. L2 is flushed before each sample, outside the timed region; on CUDA one pair of events
surrounds the call and all are read after one final synchronisation, so host time hides behind
device time exactly where it does in training. The all-reduce barrier of the multi-worker runner is
left out: there is one worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Step = Callable[[], object]
_CPU_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class Samples:
    """Durations in milliseconds, in the order taken; statistics drop the first of several."""

    raw: tuple[float, ...]

    @property
    def counted(self) -> tuple[float, ...]:
        return self.raw[1:] if len(self.raw) > 1 else self.raw

    @property
    def mean(self) -> float:
        return statistics.fmean(self.counted)

    @property
    def median(self) -> float:
        return statistics.median(self.counted)

    @property
    def min(self) -> float:
        return min(self.counted)

    @property
    def max(self) -> float:
        return max(self.counted)

    def to_json(self) -> dict[str, Any]:
        """Statistics and every raw sample, in milliseconds."""
        return {
            "unit": "ms",
            "mean": self.mean,
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "counted": len(self.counted),
            "raw": list(self.raw),
        }


class Device:
    """Marks, synchronisation and the L2 flush of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            self.flush_bytes = 2 * (l2 or 64 << 20)
        else:
            self.flush_bytes = _CPU_FLUSH_BYTES
        self._buffer = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Overwrite more than the last-level cache holds."""
        self._buffer.zero_()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """A moment on the stream (CUDA) or on the host, in a form `between` understands."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks; on CUDA both must have completed."""
        return float(start.elapsed_time(end)) if self.is_cuda else (end - start) * 1e3


def training_step(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    grad_outputs: Sequence[Tensor],
) -> Step:
    """The measured call on `target`; the same tensors every time, gradients left in `.grad`."""
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    keep = dict(kwargs)

    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        if isinstance(target, nn.Module):
            target.zero_grad(set_to_none=True)
        result = target(*args, **keep)
        if isinstance(result, Tensor):
            result.backward(grad_outputs[0])  # type: ignore[no-untyped-call]
            return
        outputs = [o for o in pytree.tree_leaves(result) if isinstance(o, Tensor)]
        torch.autograd.backward([o for o in outputs if o.requires_grad], list(grad_outputs))

    return step


def interleaved(
    steps: Mapping[str, Step],
    device: Device,
    warmup: int,
    samples: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Samples]:
    """Take `samples` of each step, round-robin, the starting step moving on by one each round.

    Raises ValueError for samples < 1 or warmup < 0.
    """
    if samples < 1 or warmup < 0:
        raise ValueError(f"samples >= 1 and warmup >= 0 are needed: got {samples} and {warmup}")
    names = list(steps)
    for _ in range(warmup):
        for name in names:
            steps[name]()
    device.synchronize()
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for round_index in range(samples):
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            device.flush()
            start = device.mark()
            steps[name]()
            marks[name].append((start, device.mark()))
        if progress:
            progress(round_index + 1, samples)
    device.synchronize()
    return {n: Samples(tuple(device.between(*pair) for pair in marks[n])) for n in names}


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of tensors: at the step's highest point, and resident before it."""

    during: int
    resident: int

    @property
    def total(self) -> int:
        return self.during + self.resident


def peak_memory(step: Step, clear: Step, device: Device) -> PeakMemory | None:
    """Peak of the allocator during one step above what is resident before it.

    `clear` drops the gradients of the step before. CUDA: the caching allocator's own counters. CPU:
    the allocations PyTorch's profiler sees; memory that generated code takes for itself is not
    among them, and None is returned when the profiler reports nothing.
    """
    step()
    clear()
    device.synchronize()
    if device.is_cuda:
        torch.cuda.reset_peak_memory_stats(device.device)
        resident = torch.cuda.memory_allocated(device.device)
        step()
        device.synchronize()
        highest = torch.cuda.max_memory_allocated(device.device)
        return PeakMemory(highest - resident, resident)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    return _host_peak(profiler)


def _host_peak(profiler: torch.profiler.profile) -> PeakMemory | None:
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    if results is None:
        return None
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    current = highest = 0
    for _, change in sorted(changes):
        current += change
        highest = max(highest, current)
    return PeakMemory(highest, 0) if changes else None
