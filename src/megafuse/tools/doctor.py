"""What this machine can run, what is missing for the rest, and the way out of each."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megafuse import rates
from megafuse.config import cache_dir
from megafuse.device import device_name
from megafuse.errors import MegafuseError
from megafuse.tools.environment import output_of, version
from megafuse.tools.ncu import find_ncu


@dataclass(frozen=True)
class Finding:
    """One thing looked for: whether it is there, what was found, what it is for, the way out."""

    name: str
    ok: bool
    found: str
    needed_for: str
    way_out: str = ""


def examine() -> list[Finding]:
    """Look at everything megafuse can use. Never raises and changes nothing."""
    return [*_basics(), *_host_compiler(), *_cuda(), *_rates(), *_extras()]


def _basics() -> Iterator[Finding]:
    py = sys.version_info
    yield Finding(
        "Python", py >= (3, 11), platform.python_version(), "everything",
        "install Python 3.11 or 3.12",
    )  # fmt: skip
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    yield Finding(
        "PyTorch", numbers >= (2, 6), torch.__version__, "everything",
        "pip install 'torch>=2.6'",
    )  # fmt: skip
    folder = cache_dir()
    above = next(p for p in (folder, *folder.parents) if p.exists())
    yield Finding(
        "kernel cache", os.access(above, os.W_OK), str(folder), "reusing built kernels",
        "set MEGAFUSE_CACHE to a folder you may write to",
    )  # fmt: skip


def _rates() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = rates.load(device_name(device))
    yield Finding(
        "measured rates", found is not None, f"of {found.date}" if found else "none, defaults",
        "predicted times of this device", "megafuse calibrate",
    )  # fmt: skip


def _host_compiler() -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    said = (output_of([compiler, "--version"]) or "").splitlines() if compiler else []
    yield Finding(
        "C++ compiler", bool(compiler), said[0] if said else "not found",
        "generated code on the CPU", "install g++ (Debian: apt-get install g++)",
    )  # fmt: skip
    library = output_of([compiler, "-print-file-name=libasan.so"]) if compiler else None
    there = bool(library and Path(library).is_absolute() and Path(library).exists())
    yield Finding(
        "sanitizers", there, "libasan" if there else "not found",
        "Options(sanitize=True)", "install the compiler's sanitizer libraries (libasan, libubsan)",
    )  # fmt: skip


def _cuda() -> Iterator[Finding]:
    built = torch.version.cuda
    yield Finding(
        "PyTorch with CUDA", bool(built), f"CUDA {built}" if built else "a CPU build",
        "fused modules on a GPU", "install a CUDA build of PyTorch from pytorch.org",
    )  # fmt: skip
    available = torch.cuda.is_available()
    name, capability = "none visible", (0, 0)
    if available:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        name += f", sm_{capability[0]}{capability[1]}"
    yield Finding(
        "GPU", available, name, "fused modules on a GPU",
        "run on a machine with an NVIDIA GPU and driver; the CPU runs the same generated source",
    )  # fmt: skip
    if available:
        yield Finding(
            "Hopper", capability == (9, 0), name, "generated matrix products (TMA + wgmma)",
            "none needed: other GPUs use torch.bmm for the products",
        )  # fmt: skip
    yield _nvrtc(built)


def _nvrtc(built: str | None) -> Finding:
    major = (built or "").partition(".")[0]
    extra = f"cuda{major}" if major in ("12", "13") else "cuda12"
    way = f"pip install 'megafuse[{extra}]'"
    purpose = "compiling CUDA kernels (no GPU needed)"
    bindings = version("cuda-bindings")
    if bindings is None:
        return Finding("NVRTC", False, "cuda-bindings is not installed", purpose, way)
    if major and bindings.partition(".")[0] != major:
        found = f"cuda-bindings {bindings} beside PyTorch's CUDA {built}"
        return Finding("NVRTC", False, found, purpose, way)
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, high, low = nvrtc.nvrtcVersion()
    except Exception as error:  # a missing library has several unrelated types
        return Finding("NVRTC", False, f"{type(error).__name__}: {error}"[:60], purpose, way)
    ok = int(status) == 0
    return Finding("NVRTC", ok, f"{high}.{low}, cuda-bindings {bindings}", purpose, way)


def _extras() -> Iterator[Finding]:
    ncu = find_ncu()
    yield Finding(
        "Nsight Compute", ncu is not None, ncu or "ncu not found",
        "megafuse profile --ncu (DRAM bytes)", "install Nsight Compute and put ncu on PATH",
    )  # fmt: skip
    triton = version("triton")
    yield Finding(
        "Triton", triton is not None, triton or "not installed",
        "the torch.compile rival on a GPU", "comes with CUDA builds of PyTorch",
    )  # fmt: skip
    from megafuse import workload

    try:
        folder, ok = str(workload.folder()), True
    except MegafuseError:
        folder, ok = "not found", False
    yield Finding(
        "workload package", ok, folder, "SUBGRAPH rankmixer and dense_ffn",
        "run inside the repository, or set MEGAFUSE_WORKLOAD",
    )  # fmt: skip


def abilities(findings: list[Finding]) -> list[tuple[str, bool]]:
    """What follows from the findings, one ability an entry."""
    ok = {f.name: f.ok for f in findings}
    base = ok["Python"] and ok["PyTorch"]
    gpu = base and ok["PyTorch with CUDA"] and ok["GPU"]
    return [
        ("fuse, check and time on the CPU", base and ok["C++ compiler"]),
        ("the reference executor (no compiler)", base),
        ("compile CUDA kernels", base and ok["NVRTC"]),
        ("fuse, check and time on the GPU", gpu and ok["NVRTC"]),
        ("generated Hopper matrix products", gpu and ok["NVRTC"] and ok.get("Hopper", False)),
        ("DRAM bytes from hardware counters", gpu and ok["Nsight Compute"]),
    ]
