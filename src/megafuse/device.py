"""What a machine can do: the numbers that the cost model and the schedules rest on."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from megafuse import rates


@dataclass(frozen=True)
class DeviceSpec:
    """Rates are measured, not from data sheets: bytes/s of a large copy, FLOP/s of a large product.

    sm_count: multiprocessors (1 for a CPU, which runs parts one after the other);
    registers, threads: of one multiprocessor; launch_seconds: of one launch, host and device;
    cached_bandwidth: bytes/s while a kernel's tensors fit in `cache_bytes` (0: not known, and
    `bandwidth` serves for all); measured: the day `megafuse calibrate` took the rates here, or ""
    where they are defaults.
    """

    name: str
    arch: str
    sm_count: int
    registers: int
    threads: int
    bandwidth: float
    matmul_rate: dict[torch.dtype, float]
    vector_rate: float
    launch_seconds: float
    cached_bandwidth: float = 0.0
    cache_bytes: int = 0
    measured: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def move_seconds(self, nbytes: int) -> float:
        """Time to move `nbytes`, the sum of what one kernel reads and writes."""
        in_cache = self.cached_bandwidth > 0 and nbytes <= self.cache_bytes
        return nbytes / (self.cached_bandwidth if in_cache else self.bandwidth)

    @property
    def source(self) -> str:
        """Where the rates come from, for people to read."""
        if self.measured:
            return f"rates measured on {self.measured} by `megafuse calibrate`"
        return "default rates"


# results/ holds the runs these come from; see docs/architecture.md.
H200 = DeviceSpec(
    "NVIDIA H200", "sm_90a", 132, 65_536, 2_048, 4.25e12,
    {torch.bfloat16: 700e12, torch.float16: 700e12, torch.float32: 50e12},
    30e12, 4e-6,
)  # fmt: skip
CPU = DeviceSpec(
    "cpu", "host", 1, 0, 1, 8e9,
    {torch.bfloat16: 5e10, torch.float16: 5e10, torch.float32: 1e11},
    4e9, 2e-6,
)  # fmt: skip


@cache
def cuda_spec(index: int) -> DeviceSpec:
    """The device's own shape; rates of the H200 scaled by multiprocessors where it is another."""
    props = torch.cuda.get_device_properties(index)
    scale = props.multi_processor_count / H200.sm_count
    return DeviceSpec(
        props.name, f"sm_{props.major}{props.minor}" + ("a" if props.major >= 9 else ""),
        props.multi_processor_count, 65_536, props.max_threads_per_multi_processor,
        H200.bandwidth * scale, {k: v * scale for k, v in H200.matmul_rate.items()},
        H200.vector_rate * scale, H200.launch_seconds,
    )  # fmt: skip


@cache
def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The name that measured rates are kept under."""
    return spec_of(device).name if device.type == "cuda" else cpu_name()


def spec_of(device: torch.device) -> DeviceSpec:
    """The device with default rates."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return cuda_spec(index)
    return CPU


def spec_for(device: torch.device) -> DeviceSpec:
    """The device, with the rates that `megafuse calibrate` measured here if there are any."""
    spec = spec_of(device)
    found = rates.load(device_name(device))
    if found is None:
        return spec
    measured = {getattr(torch, name): rate for name, rate in found.matmul_rate.items()}
    return replace(
        spec, name=found.device, bandwidth=found.bandwidth, cached_bandwidth=found.l2_bandwidth,
        cache_bytes=found.cache_bytes, launch_seconds=found.launch_seconds,
        matmul_rate={**spec.matmul_rate, **measured}, measured=found.date,
    )  # fmt: skip


def predicted_for(device: torch.device) -> DeviceSpec:
    """What predictions are made for: the device itself, or an H200 for plans made on a CPU whose
    rates nobody has measured."""
    spec = spec_for(device)
    return spec if device.type == "cuda" or spec.measured else H200
