"""The one file that knows the workload package (`research_topic_1/`): blocks, inputs, runner.

It uses only names the project brief documents (RankMixerBlockFwd, dense_ffn_v2_compute, the seeds,
the timing utility), so another copy of the package can be put in the same place.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megafuse.errors import MegafuseError

FOLDER = "research_topic_1"
PACKAGE = "rank_mixer_src"
ENTRY = f"{PACKAGE}.bench_rank_mixer"
SHAPE_NAMES = ("B", "T", "D", "k")
PRODUCTION_SHAPE = (1024, 64, 1280, 2)
CPU_SHAPE = (32, 16, 128, 2)


class WorkloadError(MegafuseError):
    """The workload package is missing, or does not accept what was asked of it."""


@dataclass(frozen=True)
class Built:
    """A seeded module with its example input and upstream gradient, both [B, T, D]."""

    module: nn.Module
    inputs: Tensor
    grad_output: Tensor


class DenseFFN(nn.Module):
    """`dense_ffn_v2_compute` as a module: the parameters of the block's dense subgraph.

    forward: inputs [B, T, D] to [B, T, D], one dtype throughout. Parameters, H = k*D:
    w1 [T, D, 2H], b1 [T, 2H], wout [T, H, D], bout [T, D], norm_x and norm_gate LayerNorm(H).
    """

    def __init__(self, block: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute
        for name in ("w1", "b1", "wout", "bout"):
            self.register_parameter(name, getattr(block, name))
        self.norm_x = block.norm_x
        self.norm_gate = block.norm_gate

    def forward(self, inputs: Tensor) -> Tensor:
        return self.compute(
            inputs, self.w1, self.b1, self.wout, self.bout, self.norm_x, self.norm_gate
        )


def folder() -> Path:
    """Where the workload package lies: MEGAFUSE_WORKLOAD, this checkout, or the current directory.

    Raises WorkloadError, naming the places that were looked at, when it is in none of them.
    """
    named = os.environ.get("MEGAFUSE_WORKLOAD")
    if named:
        candidates = [Path(named).expanduser(), Path(named).expanduser() / FOLDER]
    else:
        roots = [*Path(__file__).resolve().parents[:4], Path.cwd(), *Path.cwd().parents]
        candidates = [root / FOLDER for root in roots] + [Path.cwd()]
    for candidate in candidates:
        if (candidate / PACKAGE).is_dir():
            return candidate.resolve()
    places = "MEGAFUSE_WORKLOAD" if named else "this checkout and the current directory"
    raise WorkloadError(
        f"no {FOLDER}/{PACKAGE} in {places}: run inside the repository, or set "
        f"MEGAFUSE_WORKLOAD to the folder that holds {PACKAGE}"
    )


def _import(name: str) -> ModuleType:
    where = str(folder())
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkloadError(f"{name} in {where} does not import: {error}") from error


def default_shape(device: torch.device) -> tuple[int, ...]:
    """(B, T, D, k): the production shape on a GPU, one that runs in seconds on a CPU."""
    return PRODUCTION_SHAPE if device.type == "cuda" else CPU_SHAPE


def require_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (B, T, D, k), or raise WorkloadError saying which rule it breaks."""
    if len(shape) not in (3, 4):
        raise WorkloadError(f"--shape needs B,T,D or B,T,D,k: got {','.join(map(str, shape))}")
    b, t, d = shape[:3]
    k = shape[3] if len(shape) == 4 else 2
    if min(b, t, d, k) < 1 or d % t:
        raise WorkloadError(f"--shape needs T to divide D: got B={b} T={t} D={d}")
    return b, t, d, k


def build(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    rank: int = 0,
) -> Built:
    """Build "rankmixer" or "dense_ffn" at (B, T, D, k) from one seed, as the runner does.

    The process seed is seed + rank; the model is constructed before torch.randn draws the input.
    The upstream gradient comes from a generator of its own seeded with seed + 1000 + rank.
    Raises WorkloadError for a missing package or an illegal shape.
    """
    b, t, d, k = require_shape(shape)
    entry = _import(ENTRY)
    torch.manual_seed(seed + rank)
    try:
        module: nn.Module = entry.RankMixerBlockFwd(t, d, k, dtype=dtype, device=device)
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"RankMixerBlockFwd refused the request: {error}") from error
    inputs = torch.randn((b, t, d), dtype=dtype, device=device, requires_grad=True)
    generator = torch.Generator(device=device).manual_seed(seed + 1000 + rank)
    grad_output = torch.randn((b, t, d), dtype=dtype, device=device, generator=generator)
    if name == "dense_ffn":
        module = DenseFFN(module, entry.dense_ffn_v2_compute)
    return Built(module, inputs, grad_output)


class HostClock:
    """The timing utility's clock for CPU tensors: perf_counter marks, no stream, no barrier."""

    def synchronize(self) -> None: ...
    def flush_l2(self) -> None: ...
    def barrier(self) -> None: ...
    def event(self) -> HostMark:
        return HostMark()


class HostMark:
    """A moment on the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        import time

        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from this mark to `end`."""
        return (end.seconds - self.seconds) * 1e3


def runner_lines(
    label: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    step: Callable[[], Any],
    *,
    tf32: bool,
    warmup: int,
    num_tests: int,
    seed: int,
) -> tuple[str, str, tuple[float, ...]]:
    """Time `step` with the workload's own timing utility.

    Returns the configuration line, the timing line (microseconds) and the raw seconds.
    """
    runner, timing = _import(f"{PACKAGE}.runner"), _import(f"{PACKAGE}.timing")
    b, t, d, k = require_shape(shape)
    config = runner.BenchConfig(
        b, t, d, k, dtype=str(dtype).removeprefix("torch."), tf32=tf32, warmup=warmup,
        num_tests=num_tests, seed=seed,
    )  # fmt: skip
    clock = None if device.type == "cuda" else HostClock()
    measured = timing.time_fwd_bwd(step, warmup, num_tests, device, clock=clock)
    return f"{label} {config}", f"rank=0 mode=fwd+bwd {measured}", tuple(measured.raw)
