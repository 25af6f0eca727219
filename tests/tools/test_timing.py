import pytest
import torch
from torch import nn

from megafuse.tools import timing
from megafuse.tools.timing import Device, Samples, interleaved, peak_memory, training_step

CPU = torch.device("cpu")


def test_statistics_drop_the_first_of_several():
    samples = Samples((100.0, 1.0, 2.0, 6.0))
    assert (samples.mean, samples.median, samples.min, samples.max) == (3.0, 2.0, 1.0, 6.0)
    assert Samples((5.0,)).mean == 5.0
    assert samples.to_json()["raw"] == [100.0, 1.0, 2.0, 6.0]
    assert samples.to_json()["counted"] == 3


def test_round_robin_rotates_and_flushes_before_each_sample():
    log = []
    device = Device(CPU)
    device.flush = lambda: log.append("flush")
    steps = {name: lambda name=name: log.append(name) for name in "abc"}
    taken = interleaved(steps, device, warmup=1, samples=2)
    assert log[:3] == ["a", "b", "c"]
    assert log[3:] == ["flush", "a", "flush", "b", "flush", "c",
                       "flush", "b", "flush", "c", "flush", "a"]  # fmt: skip
    assert all(len(s.raw) == 2 and s.min >= 0 for s in taken.values())


def test_marks_cover_the_step_alone(monkeypatch):
    now = iter([0.0, 0.25, 10.0, 10.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    taken = interleaved({"a": lambda: None}, Device(CPU), warmup=0, samples=2)
    assert taken["a"].raw == (250.0, 500.0)


@pytest.mark.parametrize(("warmup", "samples"), [(-1, 1), (0, 0)])
def test_counts_must_make_sense(warmup, samples):
    with pytest.raises(ValueError, match="samples >= 1"):
        interleaved({"a": lambda: None}, Device(CPU), warmup, samples)


def test_the_step_clears_gradients_first():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    step = training_step(layer, (x,), {}, [torch.ones(2, 3)])
    step()
    once = [x.grad.clone(), layer.weight.grad.clone()]
    step()
    assert torch.equal(x.grad, once[0])
    assert torch.equal(layer.weight.grad, once[1])


def test_peak_memory_on_the_host_sees_what_is_alive_at_once():
    def step():
        a = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        b = torch.empty(2 << 20, dtype=torch.uint8)
        c = torch.empty(1 << 20, dtype=torch.uint8)
        del b, c

    peak = peak_memory(step, lambda: None, Device(CPU))
    assert peak is not None
    assert 3 << 20 <= peak.during < (3 << 20) + 100_000
