"""What a machine can do: the numbers that the cost model and the schedules rest on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceSpec:
    """Rates are measured, not from data sheets: bytes/s of a large copy, FLOP/s of a large product.

    sm_count: multiprocessors (1 for a CPU, which runs parts one after the other);
    registers, threads: of one multiprocessor; launch_seconds: of one launch, host and device.
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

    def __hash__(self) -> int:
        return hash(self.name)


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


def spec_for(device: torch.device) -> DeviceSpec:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return cuda_spec(index)
    return CPU
