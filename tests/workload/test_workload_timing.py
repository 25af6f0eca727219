"""The timing procedure under a fake clock: order of operations, units, the dropped sample."""

from collections.abc import Callable

import pytest
import torch

from rank_mixer_src.timing import Timing, time_fwd_bwd

CPU = torch.device("cpu")


class FakeClock:
    """Logs what it is asked for; `now` is in milliseconds and only moves where a test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0

    def synchronize(self) -> None:
        self.log.append("sync")

    def flush_l2(self) -> None:
        self.log.append("flush")
        self.now += 1000.0

    def barrier(self) -> None:
        self.log.append("barrier")
        self.now += 1000.0

    def event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.at = float("nan")

    def record(self) -> None:
        self.clock.log.append("record")
        self.at = self.clock.now

    def elapsed_time(self, end: "FakeEvent") -> float:
        self.clock.log.append("read")
        return end.at - self.at


def stepping(clock: FakeClock, durations: list[float]) -> Callable[[], None]:
    remaining = iter(durations)

    def step() -> None:
        clock.log.append("step")
        clock.now += next(remaining)

    return step


def test_order_of_operations() -> None:
    clock = FakeClock()
    time_fwd_bwd(stepping(clock, [1.0] * 4), 2, 2, CPU, clock=clock)
    measured = ["flush", "barrier", "record", "step", "record"]
    assert clock.log == ["sync", "step", "step", *measured, *measured, "sync", "read", "read"]


def test_first_measurement_is_dropped_and_milliseconds_become_seconds() -> None:
    clock = FakeClock()
    timing = time_fwd_bwd(stepping(clock, [70.0, 9.0, 2.0, 4.0]), 1, 3, CPU, clock=clock)
    assert timing.raw == pytest.approx((9e-3, 2e-3, 4e-3))
    assert timing.samples == pytest.approx((2e-3, 4e-3))
    assert (timing.mean, timing.min, timing.max) == pytest.approx((3e-3, 2e-3, 4e-3))
    assert str(timing) == "mean=3000.000 us min=2000.000 us max=4000.000 us samples=2"


def test_a_single_measurement_is_kept() -> None:
    clock = FakeClock()
    timing = time_fwd_bwd(stepping(clock, [5.0]), 0, 1, CPU, clock=clock)
    assert timing.samples == timing.raw == pytest.approx((5e-3,))


def test_mean_is_not_the_median() -> None:
    assert Timing((0.0, 1.0, 1.0, 4.0)).mean == 2.0


@pytest.mark.parametrize(("warmup", "num_tests"), [(-1, 1), (0, 0)])
def test_sample_counts_are_checked(warmup: int, num_tests: int) -> None:
    with pytest.raises(ValueError, match="num_tests"):
        time_fwd_bwd(lambda: None, warmup, num_tests, CPU, clock=FakeClock())
