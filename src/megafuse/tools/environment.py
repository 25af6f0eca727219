"""What a measurement was taken on: recorded beside every raw number."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megafuse.device import cpu_name

_NVIDIA_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "persistence_mode",
)

_VARIABLES = (
    "CUBLAS_", "CUDA_", "MEGAFUSE_", "NVIDIA_TF32_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
)  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, clocks and power, git commit, date (UTC), command line and the variables
    that change what PyTorch, CUDA or megafuse do.

    What cannot be found out is None; nothing here raises.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["megafuse", *sys.argv[1:]],
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "packages": {
            "torch": torch.__version__,
            **{name: version(name) for name in ("megafuse", "triton", "numpy")},
        },
        "cuda": torch.version.cuda,
        "device": str(device),
        "gpu": gpu(device),
    }


def gpu(device: torch.device) -> dict[str, Any] | None:
    """Name, capability, SMs, L2 and memory in bytes, and what nvidia-smi adds; None on a CPU."""
    if device.type != "cuda":
        return None
    p = torch.cuda.get_device_properties(device)
    return {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "l2_bytes": getattr(p, "L2_cache_size", None),
        "memory_bytes": p.total_memory,
        "nvidia_smi": nvidia_smi(device),
    }


def nvidia_smi(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks (MHz), power (W) and temperature as nvidia-smi words them, or None."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
    query = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader"]
    if uuid:  # nvidia-smi does not follow CUDA_VISIBLE_DEVICES
        query.append(f"--id={uuid if uuid.startswith('GPU-') else 'GPU-' + uuid}")
    text = output_of(query)
    if not text:
        return None
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(_NVIDIA_FIELDS, values, strict=False))


def git_commit() -> str | None:
    """The commit of the checkout this package is installed from, "+dirty" when it has changes."""
    here = Path(__file__).resolve().parent
    commit = output_of(["git", "-C", str(here), "rev-parse", "HEAD"])
    if not commit:
        return None
    dirty = output_of(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return commit + ("+dirty" if dirty else "")


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def output_of(command: list[str], timeout: float = 20.0) -> str | None:
    """Stripped standard output of a command; None when it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
