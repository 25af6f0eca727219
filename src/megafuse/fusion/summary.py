"""What a plan costs at given sizes, as plain data for tools to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megafuse.fusion.plan import WhyNotFused

Direction = Literal["forward", "backward"]
Kind = Literal["rows", "group", "matmul", "extern"]
Role = Literal["input", "grad", "temporary", "saved", "result"]


@dataclass(frozen=True)
class Line:
    """A line of the user's code and the operators of it that a region computes; `recomputed` where
    backward computes again what forward did not keep."""

    location: str
    module: str
    ops: tuple[str, ...]
    recomputed: bool = False

    def __str__(self) -> str:
        return " ".join(x for x in (self.location, f"({self.module})" if self.module else "") if x)


@dataclass(frozen=True)
class Use:
    """A buffer that a region reads or writes, and how many bytes of it."""

    buffer: str
    nbytes: int


@dataclass(frozen=True)
class BufferSummary:
    """A tensor in memory. label: the line or the argument it comes from; type: dtype and extents.

    role: "input" and "grad" are the caller's; "saved" is kept for backward, "result" handed out.
    made_by: the region that allocates it; first, last: the steps, over both directions, from the
    one that allocates it to the last that needs it (a result: the last of all).
    """

    name: str
    label: str
    type: str
    nbytes: int
    role: Role
    made_by: str = ""
    first: int = -1
    last: int = -1

    @property
    def counted(self) -> bool:
        """Whether the plan allocates it."""
        return self.role not in ("input", "grad")


@dataclass(frozen=True)
class OperatorSummary:
    """One operator of the unfused graph, and the regions that its line ended up in."""

    name: str
    op: str
    line: str
    direction: Direction
    sources: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    regions: tuple[str, ...]


@dataclass(frozen=True)
class RegionSummary:
    """One region: bytes each tensor once, floating-point operations, predicted milliseconds.

    ops: the lines it computes, without operators; why: its boundaries in one string. boundaries:
    for each region that reads its results, why the two are not one; tried: other merges that were
    tried and refused. engine: what runs it, for products.
    """

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
    lines: tuple[Line, ...] = ()
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    boundaries: tuple[WhyNotFused, ...] = ()
    tried: tuple[WhyNotFused, ...] = ()
    engine: str = ""


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
    """The whole plan; `unfused_bytes` is what the captured graph moves one operator at a time, and
    `unfused` lists its operators. buffers: by name; a saved one is a single buffer in both
    directions."""

    regions: tuple[RegionSummary, ...]
    unfused_bytes: int
    fused_bytes: int
    matmul_flops: int
    saved_bytes: int
    matmuls: tuple[MatmulShape, ...]
    buffers: tuple[BufferSummary, ...] = ()
    unfused: tuple[OperatorSummary, ...] = ()

    def live_bytes(self) -> list[int]:
        """Bytes the plan holds while each region runs: everything it has allocated and still
        needs. The caller's tensors and the scratch of column sums are not among them."""
        return [
            sum(b.nbytes for b in self.buffers if b.counted and b.first <= step <= b.last)
            for step in range(len(self.regions))
        ]
