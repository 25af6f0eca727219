"""DRAM bytes per kernel from Nsight Compute, run on one step in a child process."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafuse.errors import MegafuseError

READ, WRITE, TIME = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__time_duration.sum",
)
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class ProfileError(MegafuseError):
    """Nsight Compute is missing, not permitted, or reported nothing."""


@dataclass(frozen=True)
class KernelBytes:
    """One launch: bytes read from and written to DRAM, and its duration in milliseconds."""

    name: str
    read: float
    written: float
    milliseconds: float


def find_ncu() -> str | None:
    """The path of `ncu`, from PATH or the usual places."""
    found = shutil.which("ncu")
    if found:
        return found
    for pattern in _PLACES:
        matches = sorted(Path("/").glob(pattern.lstrip("/")))
        if matches:
            return str(matches[-1])
    return None


def measure_bytes(arguments: Sequence[str], timeout: float = 900.0) -> list[KernelBytes]:
    """Run `megafuse` with `arguments` under Nsight Compute and return the launches it profiled.

    The child brackets one step with cudaProfilerStart/Stop. Kernels are replayed one by one with
    caches flushed before each, clocks left alone: bytes are those of a cold L2.
    Raises ProfileError saying what to do.
    """
    ncu = find_ncu()
    if ncu is None:
        raise ProfileError("ncu was not found: install Nsight Compute, or leave --ncu out")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv",
            "--print-units", "base", "--metrics", f"{READ},{WRITE},{TIME}",
            "--log-file", str(log), sys.executable, "-m", "megafuse", *arguments,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ProfileError(
                f"ncu took longer than {timeout:.0f} s: try a smaller --shape"
            ) from error
        text = log.read_text(errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text + done.stdout + done.stderr:
        raise ProfileError(
            "the driver keeps performance counters for administrators: run as root, or load the "
            "NVIDIA module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    kernels = parse_csv(text)
    if not kernels:
        said = [line for line in (text + done.stderr).splitlines() if line.strip()]
        raise ProfileError(f"ncu reported no kernel: {said[-1] if said else 'no output'}")
    return kernels


def parse_csv(text: str) -> list[KernelBytes]:
    """Read ncu's long CSV (one row a metric) among its own "==PROF==" lines; base units."""
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return []
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    table = "\n".join(line for line in lines[header:] if line.startswith('"'))
    for row in csv.DictReader(io.StringIO(table)):
        _, metrics = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        scale = _UNITS.get(row["Metric Unit"])
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a" where a counter does not exist
            continue
        if scale is not None:
            metrics[row["Metric Name"]] = value * scale
    return [
        KernelBytes(name, m.get(READ, 0.0), m.get(WRITE, 0.0), m.get(TIME, 0.0))
        for name, m in launches.values()
    ]


# To bytes and milliseconds. Old versions print "nsecond" and "byte", new ones "ns" and "byte".
_UNITS = {
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "ns": 1e-6,
    "nsecond": 1e-6,
    "us": 1e-3,
    "usecond": 1e-3,
    "ms": 1.0,
    "msecond": 1.0,
}
