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
from megafuse.codegen.tiles import Staging, TileConfig
from megafuse.errors import UnsupportedError
from megafuse.fusion.tails import MOST_INS, MOST_OUTS, MOST_SUMS
from megafuse.ops import pointwise

ARCH = "sm_90a"
HALVES = (torch.bfloat16, torch.float16)
MAX_ROWS = 2  # MAX_ROW_OPERANDS of block.cuh
THREADS = 384
FINISH_THREADS, FINISH_LANES = 64, 4  # of finish.cuh: a block, and columns of a thread
_HEADERS = ("ptx.cuh", "wgmma.cuh", "block.cuh", "tail.cuh", "gemm.cuh", "finish.cuh")
_SM90 = Path(__file__).resolve().parent / "tile" / "sm90"

Major = Literal["k", "mn"]
"""The contiguous dimension of an operand: the one summed over, or the other one."""

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
class Tail:
    """Pointwise work on the finished, rounded product with `ins` tensors of its shape, giving
    `outs` tensors and `sums` column sums. body: C++ from x and t[i] to y[i] and s[i]."""

    body: tuple[str, ...]
    ins: int
    outs: int
    sums: int

    @property
    def depth(self) -> int:
        """Results leave from where operands came in."""
        return max(self.ins, self.outs)


@dataclass(frozen=True)
class MatmulSpec:
    """Everything that decides the code of one product. `dtype` of A and B, `out` of C, `row` of all
    row operands, `tensor` of the tensor operand. Accumulation is in float32. split: the kernel sums
    over splits of k, and leaves the epilogue to a second one. tail: its tensors, and C, have the
    dtype `out`."""

    dtype: torch.dtype
    a_major: Major
    b_major: Major
    epilogue: tuple[Step, ...]
    out: torch.dtype
    tile: TileConfig
    row: torch.dtype = torch.bfloat16
    tensor: torch.dtype = torch.bfloat16
    jitter: bool = False
    split: bool = False
    tail: Tail | None = None

    @property
    def rows(self) -> int:
        return sum(s.operand == "row" for s in self.epilogue)

    @property
    def row_bytes(self) -> int:
        """Shared memory that the product's kernel needs a column for row operands."""
        return 0 if self.split else self.rows * self.row.itemsize

    @property
    def has_tensor(self) -> bool:
        return any(s.operand == "tensor" for s in self.epilogue)

    @property
    def staging(self) -> Staging:
        tail = self.tail
        return self.tile.staging(tail.depth, tail.sums) if tail else self.tile.staging()


@dataclass(frozen=True)
class MatmulKernel:
    """Generated source of one product. shared_bytes: dynamic shared memory the launch asks for.
    finish: the second kernel of a product whose k's are split, else None."""

    spec: MatmulSpec
    name: str
    source: str
    shared_bytes: int
    stages: int
    finish: str | None

    @property
    def names(self) -> list[str]:
        """All kernels of the source."""
        return [self.name, *([self.finish] if self.finish else [])]

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


def refused_tail(tail: Tail) -> str | None:
    """Why a tail of this size cannot follow a product inside its kernel; None when it can."""
    if not 1 <= tail.outs <= MOST_OUTS or tail.ins > MOST_INS or tail.sums > MOST_SUMS:
        return (
            f"a product's kernel takes in at most {MOST_INS} tensors behind the product, and "
            f"writes 1 to {MOST_OUTS} and at most {MOST_SUMS} column sums, not {tail.ins}, "
            f"{tail.outs} and {tail.sums}"
        )
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
    if reason is None and spec.tail is not None:
        reason = refused_tail(spec.tail)
        if spec.split or spec.has_tensor:
            reason = "a tail follows a product in one pass, and brings in all tensors itself"
    if reason is not None:
        raise UnsupportedError(reason)
    tile, tail, staging = spec.tile, spec.tail, spec.staging
    stages = tile.stages(spec.row_bytes, staging)
    shared = tile.shared_bytes(spec.row_bytes, staging)
    split_m, split_n = (2, 1) if tile.split == "m" else (1, 2)
    # The epilogue's half of the struct is the second kernel's where k is split.
    after = f"""\
  static constexpr bool tensor = {_bool(spec.has_tensor)};
  static constexpr int rows = {spec.rows};
  using Row = {CPP_TYPE[spec.row]};
  using Tensor = {CPP_TYPE[spec.tensor]};
  using Out = {CPP_TYPE[spec.out]};

{_epilogue(spec)}"""
    nothing = """\
  static constexpr bool tensor = false;
  static constexpr int rows = 0;
  using Row = float;
"""
    body = f"""\
namespace {{
// C = A ({spec.a_major}-major) @ B ({spec.b_major}-major), tile {tile} x 64, {stages} stages.
struct Spec {{
  static constexpr int split_m = {split_m}, split_n = {split_n}, width = {tile.width};
  static constexpr int stages = {stages}, shared_bytes = {shared};
  static constexpr bool a_k_major = {_bool(spec.a_major == "k")};
  static constexpr bool b_k_major = {_bool(spec.b_major == "k")};
  static constexpr bool split = {_bool(spec.split)}, tail = {_bool(tail is not None)};
  static constexpr int places = {staging.places}, depth = {staging.depth}, sums = {staging.sums};
{nothing if spec.split else after}{_tail(tail) if tail else ""}
{_mma(spec)}}};
{f"struct Finish {{{chr(10)}{after}}};{chr(10)}" if spec.split else ""}}}  // namespace
"""
    digest = hashlib.sha256(f"{spec}".encode()).hexdigest()[:8]
    kind = "split_" if spec.split else "tail_" if tail else ""
    name = f"mf_matmul_{kind}{spec.a_major}{spec.b_major}_{tile}_{digest}"
    finish = f"{name}_finish" if spec.split else None
    kernel = f"""
extern "C" __global__ void __launch_bounds__({THREADS}, 1)
{name}(const __grid_constant__ mf::sm90::{"TailArgs" if tail else "Args"} args) {{
  mf::sm90::gemm<Spec>(args);
}}
"""
    if finish:
        kernel += f"""
extern "C" __global__ void __launch_bounds__({FINISH_THREADS}, 8)
{finish}(const __grid_constant__ mf::sm90::FinishArgs args) {{
  mf::sm90::finish_product<Finish>(args);
}}
"""
    jitter = "#define MF_JITTER 1\n" if spec.jitter else ""
    source = jitter + _headers() + body + kernel
    return MatmulKernel(spec, name, source, shared, stages, finish)


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


def _tail(tail: Tail) -> str:
    body = "".join(f"    {line}\n" for line in tail.body)
    return f"""
  static constexpr int ins = {tail.ins}, outs = {tail.outs};
  // x: the product's element; t: the operands'; y: the results; s: what the column sums add up.
  MF_FN static void after(mf::real x, const float* t, float* y, float* s) {{
{body}  }}
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
