"""What a plan costs at given sizes, as plain data for tools to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Direction = Literal["forward", "backward"]
Kind = Literal["rows", "group", "matmul", "extern"]


@dataclass(frozen=True)
class RegionSummary:
    """One region: bytes each tensor once, floating-point operations, predicted milliseconds."""

    name: str
    direction: Direction
    kind: Kind
    ops: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    predicted_ms: float
    launches: int
    kernels: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class MatmulShape:
    """A batched product [batch, m, k] @ [batch, k, n]; transposed operands are read by stride."""

    batch: int
    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool
    dtype: torch.dtype
    direction: Direction


@dataclass(frozen=True)
class PlanSummary:
    """The whole plan; `unfused_bytes` is what the captured graph moves one operator at a time."""

    regions: tuple[RegionSummary, ...]
    unfused_bytes: int
    fused_bytes: int
    matmul_flops: int
    saved_bytes: int
    matmuls: tuple[MatmulShape, ...]
