import os

import pytest
import standin
import torch

from megafuse.tools import ncu
from megafuse.tools.ncu import KernelBytes, ProfileError, measure_bytes, parse_csv
from megafuse.tools.profile import (
    OUTSIDE,
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
