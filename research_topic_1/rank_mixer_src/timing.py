"""The timing utility: one pair of events around each complete forward+backward call.

`time_fwd_bwd` is the procedure, a `Clock` what it needs from the device, `CudaClock` the real one.
Any program can time its own module under the same procedure by passing its own `step`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class TimingEvent(Protocol):
    """A mark on the device's stream."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to `end`; both must have completed."""


class Clock(Protocol):
    """What `time_fwd_bwd` asks of a device."""

    def synchronize(self) -> None: ...
    def flush_l2(self) -> None: ...
    def barrier(self) -> None: ...
    def event(self) -> TimingEvent: ...


class CudaClock:
    """CUDA events, an L2 flush and an on-stream barrier, all on the current stream.

    Make `device` the current device before timing, as torch.cuda.set_device does.
    The flush zeroes a buffer of twice the L2 size, which the clock keeps: reuse a clock, reuse the
    buffer. The barrier is a one-element all-reduce over `group` (None: the default process group).
    With no process group initialised there are no other workers and it is left out.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush_buffer = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, device=device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def flush_l2(self) -> None:
        self._flush_buffer.zero_()

    def barrier(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._token, group=self.group)

    def event(self) -> TimingEvent:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Timing:
    """Durations in seconds: `raw` keeps all in order, the statistics leave the dropped one out."""

    raw: tuple[float, ...]

    @property
    def samples(self) -> tuple[float, ...]:
        """The measurements that count: all but the first when there is more than one."""
        return self.raw[1:] if len(self.raw) > 1 else self.raw

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return sum(self.samples) / len(self.samples)

    @property
    def min(self) -> float:
        return min(self.samples)

    @property
    def max(self) -> float:
        return max(self.samples)

    def __str__(self) -> str:
        """Mean, minimum and maximum in microseconds."""
        mean, low, high = (1e6 * value for value in (self.mean, self.min, self.max))
        return f"mean={mean:.3f} us min={low:.3f} us max={high:.3f} us samples={len(self.samples)}"


def time_fwd_bwd(
    step: Callable[[], object],
    warmup: int,
    num_tests: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    clock: Clock | None = None,
) -> Timing:
    """Time `num_tests` calls of `step`, a complete forward+backward, after `warmup` untimed ones.

    Synchronise; warm up; then for each measurement flush L2, all-reduce on the stream, record the
    start event, call `step`, record the end event. Flush and barrier lie outside the timed region.
    Events are read after one final synchronisation. `clock` defaults to CudaClock(device, group).

    Raises ValueError when warmup is negative or num_tests is below 1.
    """
    if warmup < 0 or num_tests < 1:
        raise ValueError(f"warmup >= 0 and num_tests >= 1 are needed: got {warmup} and {num_tests}")
    if clock is None:
        clock = CudaClock(device, group)
    clock.synchronize()
    for _ in range(warmup):
        step()
    marks = []
    for _ in range(num_tests):
        start, end = clock.event(), clock.event()
        clock.flush_l2()
        clock.barrier()
        start.record()
        step()
        end.record()
        marks.append((start, end))
    clock.synchronize()
    return Timing(tuple(start.elapsed_time(end) / 1e3 for start, end in marks))
