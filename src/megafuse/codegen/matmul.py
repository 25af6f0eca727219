"""A matmul region for Hopper as C++: the skeleton of ``tile/sm90`` with a generated epilogue.

What depends on run-time sizes alone (extents, strides, tile counts) is an argument of the kernel;
what decides the code (dtypes, which dimension of an operand is contiguous, the epilogue, the tile)
is a `MatmulSpec`. Equal specs give equal source.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from megafuse.codegen.expr import CPP_TYPE, rounded, scalar_cpp
from megafuse.errors import UnsupportedError
from megafuse.ops import pointwise

ARCH = "sm_90a"
HALVES = (torch.bfloat16, torch.float16)
MAX_ROWS = 2  # MAX_ROW_OPERANDS of block.cuh
THREADS = 384
_HEADERS = ("ptx.cuh", "wgmma.cuh", "block.cuh", "gemm.cuh")
_SM90 = Path(__file__).resolve().parent / "tile" / "sm90"

Major = Literal["k", "mn"]
"""The contiguous dimension of an operand: the one summed over, or the other one."""

# ---- tiles ---------------------------------------------------------------------------------------

_SHARED_LIMIT = 227 * 1024
_ALIGNMENT = 1023  # lost when the dynamic shared memory does not start at a multiple of 1024
_BLOCK_K, _CHUNK_BYTES, _MOST_STAGES = 64, 8192, 8


@dataclass(frozen=True)
class TileConfig:
    """The part of C a block computes at a time: two warpgroups of 64 rows x `width` columns each,
    one above the other (split "m") or side by side ("n")."""

    split: Literal["m", "n"]
    width: int

    @property
    def m(self) -> int:
        return 128 if self.split == "m" else 64

    @property
    def n(self) -> int:
        return self.width if self.split == "m" else 2 * self.width

    @property
    def stage_bytes(self) -> int:
        """One k-block of A and of B, in 16-bit elements."""
        return (self.m + self.n) * 2 * _BLOCK_K

    def fixed_bytes(self, row_bytes: int, stages: int) -> int:
        """Shared memory beside the pipeline stages; row_bytes: of one column's row operands."""
        slots = min(2, self.width // 64)
        barriers = 2 * stages + 4 * slots + 2
        return 2 * slots * _CHUNK_BYTES + row_bytes * self.n + 8 * barriers + _ALIGNMENT

    def stages(self, row_bytes: int) -> int:
        """The deepest pipeline that fits."""
        for stages in range(_MOST_STAGES, 2, -1):
            if stages * self.stage_bytes + self.fixed_bytes(row_bytes, stages) <= _SHARED_LIMIT:
                return stages
        return 2

    def shared_bytes(self, row_bytes: int) -> int:
        stages = self.stages(row_bytes)
        return stages * self.stage_bytes + self.fixed_bytes(row_bytes, stages)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}"


TILES = (TileConfig("m", 256), TileConfig("m", 128), TileConfig("n", 128), TileConfig("n", 64))
"""Largest first: of tiles predicted equal the largest is taken."""

# Measured on an H200 with a 128x256 tile: 1030 cycles a k-block (the tensor cores' own 1024) and
# about 1850 a tile. A smaller tile needs its share of the products, but no less time than its
# operands take to arrive, at the 48 bytes a cycle that a multiprocessor was seen to get. Of the
# cost of a tile a third is taken to be fixed (filling the pipeline, the last barrier).
_BLOCK_CYCLES, _TILE_CYCLES, _FIXED_CYCLES = 1030.0, 1230.0, 620.0
_BYTES_PER_CYCLE = 48.0
_FULL = 128 * 256


def cycles(tile: TileConfig, batch: int, m: int, n: int, k: int, sm_count: int) -> float:
    """Predicted cycles of one product: waves of blocks x the time of one tile."""
    share = tile.m * tile.n / _FULL
    tiles = batch * -(-m // tile.m) * -(-n // tile.n)
    block = max(_BLOCK_CYCLES * share, tile.stage_bytes / _BYTES_PER_CYCLE)
    once = -(-k // _BLOCK_K) * block + _TILE_CYCLES * share + _FIXED_CYCLES
    return -(-tiles // sm_count) * once


def ranked_tiles(batch: int, m: int, n: int, k: int, sm_count: int) -> list[TileConfig]:
    """Every tile, fastest by prediction first. All sum over k in the same order, so the choice does
    not change the result."""
    return sorted(TILES, key=lambda tile: cycles(tile, batch, m, n, k, sm_count))


# ---- specification -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One pointwise operator of an epilogue, applied to the value so far.

    op: a name of ``ops.pointwise``, or "round" (to the result's dtype, as eager does between ops).
    operand: the second argument of a binary op: "row" (the next [batch, n] operand, the same for
    all rows), "tensor" (the [batch, m, n] operand; at most one step reads it), or a number.
    first: the operand is the left argument, as in `1 - value`.
    """

    op: str
    operand: Literal["row", "tensor"] | float | None = None
    first: bool = False


@dataclass(frozen=True)
class MatmulSpec:
    """Everything that decides the code of one product. `dtype` of A and B, `out` of C, `row` of all
    row operands, `tensor` of the tensor operand. Accumulation is in float32."""

    dtype: torch.dtype
    a_major: Major
    b_major: Major
    epilogue: tuple[Step, ...]
    out: torch.dtype
    tile: TileConfig
    row: torch.dtype = torch.bfloat16
    tensor: torch.dtype = torch.bfloat16
    jitter: bool = False

    @property
    def rows(self) -> int:
        return sum(s.operand == "row" for s in self.epilogue)

    @property
    def row_bytes(self) -> int:
        return self.rows * self.row.itemsize

    @property
    def has_tensor(self) -> bool:
        return any(s.operand == "tensor" for s in self.epilogue)


@dataclass(frozen=True)
class MatmulKernel:
    """Generated source of one product. shared_bytes: dynamic shared memory the launch asks for."""

    spec: MatmulSpec
    name: str
    source: str
    shared_bytes: int
    stages: int

    @property
    def fast(self) -> bool:
        """Approximate exp and division: every result is 16 bits wide."""
        return True


def refused_epilogue(epilogue: tuple[Step, ...]) -> str | None:
    """Why these steps cannot follow a product inside its kernel; None when they can."""
    for step in epilogue:
        if step.op == "round":
            continue
        if step.op not in pointwise.TABLE:
            return f"an epilogue cannot hold {step.op}, which is no pointwise operator"
        arity = pointwise.TABLE[step.op].arity
        if arity != (1 if step.operand is None else 2):
            return f"{step.op} takes {arity} arguments, which an epilogue step does not give it"
    if sum(s.operand == "tensor" for s in epilogue) > 1:
        return "the kernel has room to bring in one tensor operand beside the product, not more"
    if sum(s.operand == "row" for s in epilogue) > MAX_ROWS:
        return f"the kernel brings in at most {MAX_ROWS} operands of one row"
    return None


# ---- emission ------------------------------------------------------------------------------------


@cache
def emit_matmul(spec: MatmulSpec) -> MatmulKernel:
    """The kernel of `spec`. Raises UnsupportedError for an epilogue or dtype it cannot have."""
    reason = refused_epilogue(spec.epilogue)
    if reason is None and not {spec.dtype, spec.out, spec.tensor} <= set(HALVES):
        reason = "the Hopper product reads and writes 16-bit floats only"
    if reason is None and spec.row not in (*HALVES, torch.float32):
        reason = f"a row operand of {spec.row} is not supported"
    if reason is not None:
        raise UnsupportedError(reason)
    tile, stages = spec.tile, spec.tile.stages(spec.row_bytes)
    shared = tile.shared_bytes(spec.row_bytes)
    split_m, split_n = (2, 1) if tile.split == "m" else (1, 2)
    body = f"""\
namespace {{
// C = A ({spec.a_major}-major) @ B ({spec.b_major}-major), tile {tile} x 64, {stages} stages.
struct Spec {{
  static constexpr int split_m = {split_m}, split_n = {split_n}, width = {tile.width};
  static constexpr int stages = {stages}, shared_bytes = {shared};
  static constexpr bool a_k_major = {_bool(spec.a_major == "k")};
  static constexpr bool b_k_major = {_bool(spec.b_major == "k")};
  static constexpr bool tensor = {_bool(spec.has_tensor)};
  static constexpr int rows = {spec.rows};
  using Row = {CPP_TYPE[spec.row]};
  using Tensor = {CPP_TYPE[spec.tensor]};
  using Out = {CPP_TYPE[spec.out]};

{_mma(spec)}
{_epilogue(spec)}}};
}}  // namespace
"""
    digest = hashlib.sha256(f"{spec}".encode()).hexdigest()[:8]
    name = f"mf_matmul_{spec.a_major}{spec.b_major}_{tile}_{digest}"
    kernel = f"""
extern "C" __global__ void __launch_bounds__({THREADS}, 1)
{name}(const __grid_constant__ mf::sm90::Args args) {{
  mf::sm90::gemm<Spec>(args);
}}
"""
    jitter = "#define MF_JITTER 1\n" if spec.jitter else ""
    return MatmulKernel(spec, name, jitter + _headers() + body + kernel, shared, stages)


@cache
def _headers() -> str:
    return "".join(f'#line 1 "sm90/{name}"\n{(_SM90 / name).read_text()}' for name in _HEADERS) + (
        '#line 1 "generated"\n'
    )


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _mma(spec: MatmulSpec) -> str:
    """The wgmma of one step of 16 k's. Its accumulator is named register by register, so the
    instruction is spelled here and not in a header."""
    n, half = spec.tile.width, spec.tile.width // 2
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[spec.dtype]
    registers = ", ".join(f"%{i}" for i in range(half))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    transposed = f"{int(spec.a_major != 'k')}, {int(spec.b_major != 'k')}"
    a, b, high, keep = (f"%{half + i}" for i in range(4))
    return f"""\
  // d = a * b, or d += a * b where `keep` is not zero; a, b: low halves of descriptors.
  MF_FN static void mma(float (&d)[{half}], unsigned a, unsigned b, int keep) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 da, db;\\n"
        "setp.ne.b32 p, {keep}, 0;\\nmov.b64 da, {{{a}, {high}}};\\nmov.b64 db, {{{b}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
        "{{{registers}}}, "
        "da, db, p, 1, 1, {transposed};\\n}}"
        : {outputs}
        : "r"(a), "r"(b), "r"(mf::sm90::DESCRIPTOR_HIGH), "r"(keep));
  }}
"""


def _epilogue(spec: MatmulSpec) -> str:
    """One element of C from its accumulator, a line for each step."""
    lines, value, row = [], "x0", 0
    for i, step in enumerate(spec.epilogue):
        if step.op == "round":
            text = rounded(value, spec.out)
        elif step.op == "cast":
            text = value
        else:
            args = [value]
            if step.operand == "row":
                args.append(f"row[{row}]")
                row += 1
            elif step.operand == "tensor":
                args.append("tensor")
            elif step.operand is not None:
                args.append(scalar_cpp(step.operand))
            if step.first:
                args.reverse()
            text = pointwise.TABLE[step.op].cpp.format(*args)
        value = f"x{i + 1}"
        lines.append(f"    const float {value} = {text};  // {step.op}\n")
    return f"""\
  // x0: the product; row: the row operands at this column; tensor: the tensor operand's element.
  MF_FN static float epilogue(float x0, const float* row, float tensor) {{
{"".join(lines)}    return {value};
  }}
"""
