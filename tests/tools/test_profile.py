import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import standin
import torch

from megafuse.tools import ncu
from megafuse.tools.ncu import KernelBytes, ProfileError, measure_bytes, parse_csv
from megafuse.tools.profile import (
    OUTSIDE,
    _device_entries,
    by_region,
    kernel_table,
    kernel_times,
    method,
    region_of,
    region_table,
)
from megafuse.tools.tables import console

REGIONS = standin.plan().regions

LONG_CSV = """==PROF== Connected to process 12 (/usr/bin/python3.12)
==PROF== Profiling "f1_norm": 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","12","f1_norm(Args)","dram__bytes_read.sum","byte","1,000"
"0","12","f1_norm(Args)","dram__bytes_write.sum","byte","500"
"0","12","f1_norm(Args)","gpu__time_duration.sum","ns","2,000"
"1","12","void b1_norm<int>(Args)","dram__bytes_read.sum","Kbyte","2.5"
"1","12","void b1_norm<int>(Args)","dram__bytes_write.sum","byte","n/a"
"1","12","void b1_norm<int>(Args)","gpu__time_duration.sum","nsecond","1000"
==PROF== Disconnected
"""


def test_ncu_output_is_read():
    first, second = parse_csv(LONG_CSV)
    assert first == KernelBytes("f1_norm(Args)", 1000, 500, 0.002)
    assert (second.read, second.written) == (2500, 0)
    assert parse_csv("==ERROR== nothing") == []


@pytest.mark.parametrize(
    ("kernel", "region"),
    [("f1_norm", "F1"), ("void b1_norm<int, 4>(Args)", "B1"), ("f1_norm_2", OUTSIDE),
     ("F2", "F2"), ("aten::bmm", OUTSIDE), ("megafuse::F2", "F2")],
)  # fmt: skip
def test_kernels_belong_to_the_region_that_names_them(kernel, region):
    assert region_of(kernel, REGIONS) == region


def test_operators_belong_to_the_range_around_them():
    a = torch.randn(64, 64)

    def step():
        with torch.profiler.record_function("F2"):
            a @ a
        torch.sin(a)

    times = kernel_times(step, cuda=False, plan=standin.plan(), repeats=3)
    owners = {t.name: (t.region, t.calls) for t in times}
    assert owners["aten::mm"] == ("F2", 1)
    assert owners["aten::sin"] == (OUTSIDE, 1)
    totals = by_region(times)
    assert totals["F2"] > 0
    assert sum(totals.values()) == pytest.approx(sum(t.milliseconds for t in times))
    out = console()
    with out.capture() as text:
        out.print(kernel_table(times, parse_csv(LONG_CSV)))
        out.print(region_table(times, standin.plan(), parse_csv(LONG_CSV)))
    shown = text.get()
    assert max(map(len, shown.splitlines())) <= 100
    row = next(line for line in shown.splitlines() if line.startswith(" F1"))
    assert "1.5 kB" in row and "0.25" in row  # counted bytes, and their share of the plan's 6000


@dataclass
class Span:
    start: float
    end: float


@dataclass
class Launched:
    name: str
    device: int
    duration: float


@dataclass
class Event:
    """What `torch.autograd.profiler_util.FunctionEvent` tells of an event."""

    id: int
    name: str
    time_range: Span
    device_type: str = "DeviceType.CPU"
    kernels: list[Launched] = field(default_factory=list)
    cpu_parent: Any = None
    self_device_time_total: float = 0.0


@dataclass
class AnnotatedEvent(Event):
    """Of PyTorch versions that also report recorded ranges as events of the device."""

    is_user_annotation: bool = False


def on_device(make, id, name, start, end, **more):
    span = Span(start, end)
    return make(id, name, span, "DeviceType.CUDA", self_device_time_total=end - start, **more)


@pytest.mark.parametrize("annotated", [False, True])
def test_every_launch_counts_once_under_the_region_that_made_it(annotated):
    """A row kernel, one product kernel launched by two regions of a backward (which PyTorch ties to
    the whole backward, or to nothing), cuBLAS by an operator, and a kernel of nobody."""
    make = AnnotatedEvent if annotated else Event
    mm, gemm = "mf_matmul_kn_128", "sm90_xmma_gemm"
    backward = make(1, "CallBackward", Span(0, 100))
    ranges = [make(i, name, Span(10 * i, 10 * i + 8), cpu_parent=backward)
              for i, name in ((2, "F1"), (3, "F2"), (4, "B1"))]  # fmt: skip
    operator = make(5, "aten::mm", Span(41, 47), cpu_parent=ranges[2])
    calls = [make(900 + i, "cuLaunchKernelEx", Span(10 * i + 2, 10 * i + 3)) for i in (2, 3, 4)]
    host = [backward, *ranges, operator, *calls]
    kernels = [
        on_device(make, 902, "f1_norm", 200, 210), on_device(make, 903, mm, 210, 240),
        on_device(make, 904, mm, 240, 290), on_device(make, 77, gemm, 290, 297),
        on_device(make, 78, "elementwise", 297, 298),
    ]  # fmt: skip
    backward.kernels = [Launched(k.name, 0, k.time_range.end - k.time_range.start)
                        for k in kernels[:3]]  # fmt: skip
    operator.kernels = [Launched(gemm, 0, 7)]
    shown = []
    if annotated:
        shown = [on_device(make, i, r.name, 200, 290, is_user_annotation=True)
                 for i, r in enumerate(ranges)]  # fmt: skip
        ranges[0].kernels = [Launched("F1", 0, 90)]
    else:  # a version that reports them without saying what they are
        shown = [on_device(make, 2, "F1", 200, 290)]
    found = list(_device_entries([*host, *shown, *kernels], REGIONS))
    assert found == [
        ("f1_norm", "F1", 10), (mm, "F2", 30), (mm, "B1", 50), (gemm, "B1", 7),
        ("elementwise", OUTSIDE, 1),
    ]  # fmt: skip


def test_method_states_units_and_sources():
    assert "dram__bytes_read.sum" in method(True, True)
    assert "need a GPU" in method(False, False)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    def install(body):
        path = tmp_path / "ncu"
        path.write_text("#!/bin/sh\n" + body)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_ncu_is_run_on_ourselves(fake_ncu, tmp_path):
    (tmp_path / "out.csv").write_text(LONG_CSV)
    fake_ncu(f"""echo "$@" > {tmp_path}/said
while [ "$1" != "--log-file" ]; do shift; done
cp {tmp_path}/out.csv "$2"
""")
    assert [k.read for k in measure_bytes(["profile", "--one-step"])] == [1000, 2500]
    said = (tmp_path / "said").read_text()
    assert "--profile-from-start off --clock-control none" in said
    assert "-m megafuse profile --one-step" in said


def test_ncu_without_permission_or_output(fake_ncu, monkeypatch):
    fake_ncu("echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1\n")
    with pytest.raises(ProfileError, match="NVreg_RestrictProfilingToAdminUsers"):
        measure_bytes([])
    fake_ncu("echo 'it broke' >&2; exit 1\n")
    with pytest.raises(ProfileError, match="no kernel: it broke"):
        measure_bytes([])
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(ProfileError, match="install Nsight Compute"):
        measure_bytes([])
