"""A product on Hopper's tensor cores: what it accepts, its tensor maps, its launch.

The kernel is ``codegen.matmul``'s. Its parameter struct holds a tensor map for each operand, which
the driver encodes once for the sizes and then only re-addresses: a launch whose pointers are those
of the last one packs nothing.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megafuse.codegen.matmul import (
    ARCH,
    HALVES,
    MAX_ROWS,
    THREADS,
    Major,
    MatmulKernel,
    MatmulSpec,
    Step,
    TileConfig,
    emit_matmul,
    ranked_tiles,
    refused_epilogue,
)
from megafuse.errors import UnsupportedError
from megafuse.fusion.plan import Operand
from megafuse.ir import evaluate
from megafuse.runtime import cuda

# ---- operands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A strided part of a buffer: shape, strides and offset from the buffer's start in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """`tensor` itself, its own first element being the buffer's start."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def of_operand(cls, operand: Operand, sizes: Mapping[str, int]) -> View:
        return cls(
            tuple(evaluate(d, sizes) for d in operand.shape),
            tuple(evaluate(d, sizes) for d in operand.strides),
            operand.buffer.dtype, evaluate(operand.offset, sizes),
        )  # fmt: skip

    @property
    def start(self) -> int:
        """Bytes from the buffer's start to the first element."""
        return self.offset * self.dtype.itemsize


@dataclass(frozen=True)
class Product:
    """c[b] = epilogue(a[b] @ b[b]).

    a: [batch, m, k]; b: [batch, k, n]; c: [batch, m, n]; rows: [batch, n] or [n] each, in the order
    the epilogue's steps take them; tensor: [batch, m, n].
    """

    a: View
    b: View
    c: View
    epilogue: tuple[Step, ...] = ()
    rows: tuple[View, ...] = ()
    tensor: View | None = None

    @property
    def batch(self) -> int:
        return self.c.shape[0]

    @property
    def m(self) -> int:
        return self.c.shape[1]

    @property
    def n(self) -> int:
        return self.c.shape[2]

    @property
    def k(self) -> int:
        return self.a.shape[2]


@dataclass(frozen=True)
class MapLayout:
    """A tensor map before it has an address: extents innermost first, strides in bytes of all but
    the innermost. step: 0 where all batches share the operand, whose map then has a single one."""

    dtype: torch.dtype
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    step: int

    def box(self, rows: int) -> tuple[int, int, int]:
        """64 elements, one swizzled row of 128 bytes, times `rows`."""
        return 64, rows, 1


_MOST_EXTENT, _MOST_STRIDE, _ALIGNMENT = 1 << 31, 1 << 40, 16


def map_layout(view: View, inner: int, name: str) -> MapLayout | str:
    """How the copy engine addresses `view` with dimension `inner` (1 or 2) contiguous; a sentence
    when it cannot."""
    outer, size = 3 - inner, view.dtype.itemsize
    extents = view.shape[inner], view.shape[outer], view.shape[0]
    if extents[0] > 1 and view.strides[inner] != 1:
        return f"neither dimension of {name} is contiguous (strides {view.strides})"
    if view.start % _ALIGNMENT:
        return f"{name} starts {view.start} bytes into its buffer, no multiple of 16"
    if max(extents) >= _MOST_EXTENT:
        return f"{name} has an extent of {max(extents)}, more than a tensor map can hold"
    dense = _round_up(extents[0] * size)
    row = view.strides[outer] * size if extents[1] > 1 else dense
    shared = extents[2] == 1 or view.strides[0] == 0
    plane = _round_up(row * extents[1]) if shared else view.strides[0] * size
    for stride, what in ((row, "rows"), (plane, "batches")):
        if stride <= 0 or stride % _ALIGNMENT or stride >= _MOST_STRIDE:
            return f"the {what} of {name} are {stride} bytes apart, which is no multiple of 16"
    batches = 1 if shared else extents[2]
    return MapLayout(view.dtype, (extents[0], extents[1], batches), (row, plane), int(not shared))


def _round_up(value: int) -> int:
    return -(-value // _ALIGNMENT) * _ALIGNMENT


def _operand_layout(view: View, k_dim: int, name: str) -> tuple[Major, MapLayout] | str:
    """The operand with k contiguous if it can be read so, else with its other dimension."""
    reason = ""
    majors: tuple[tuple[Major, int], ...] = (("k", k_dim), ("mn", 3 - k_dim))
    for major, inner in majors:
        layout = map_layout(view, inner, name)
        if not isinstance(layout, str):
            return major, layout
        # The dimension that is contiguous has the more telling reason.
        if not reason or view.strides[inner] == 1:
            reason = layout
    return reason


def accepts(product: Product, arch: str = ARCH) -> str | None:
    """Why this product has to go another way, in a sentence; None when the kernel takes it.

    Pointers are judged at the launch: see `Matmul.aligned`.
    """
    layouts = _layouts(product)
    return _refused(product, arch) or (layouts if isinstance(layouts, str) else None)


@dataclass(frozen=True)
class _Layouts:
    a_major: Major
    b_major: Major
    a: MapLayout
    b: MapLayout
    c: MapLayout
    tensor: MapLayout | None


def _refused(product: Product, arch: str) -> str | None:
    """Everything that is not about addressing."""
    a, b, c, tensor = product.a, product.b, product.c, product.tensor
    if arch != ARCH:
        return f"the kernel is written for {ARCH}, and this device is {arch}"
    if a.dtype not in HALVES or b.dtype != a.dtype:
        return f"the kernel multiplies bfloat16 or float16, not {a.dtype} by {b.dtype}"
    if c.dtype not in HALVES:
        return f"the kernel writes bfloat16 or float16, not {c.dtype}"
    batch, m, n, k = product.batch, product.m, product.n, product.k
    if a.shape != (batch, m, k) or b.shape != (batch, k, n):
        return f"the shapes {a.shape} @ {b.shape} -> {c.shape} are no batched product"
    if k == 0:
        return "a sum over no elements needs no tensor core"
    if (m > 1 and c.strides[1] < n) or (batch > 1 and c.strides[0] == 0):
        return f"elements of the result overlap (strides {c.strides})"
    if reason := refused_epilogue(product.epilogue):
        return reason
    rows = sum(s.operand == "row" for s in product.epilogue)
    if rows != len(product.rows) or any(s.operand == "tensor" for s in product.epilogue) != (
        tensor is not None
    ):
        return "the epilogue's steps and operands do not match"
    if len({r.dtype for r in product.rows}) > 1:
        return "the row operands of an epilogue must have one dtype"
    for row in product.rows:
        if reason := _refused_row(row, batch, n):
            return reason
    if tensor is not None and (tensor.dtype not in HALVES or tensor.shape != c.shape):
        return f"a tensor operand is bfloat16 or float16 in the result's shape, not {tensor}"
    return None


def _refused_row(row: View, batch: int, n: int) -> str | None:
    size = row.dtype.itemsize
    if row.dtype not in (*HALVES, torch.float32):
        return f"a row operand is bfloat16, float16 or float32, not {row.dtype}"
    if row.shape not in ((n,), (batch, n), (1, n)):
        return f"a row operand has shape [{n}] or [{batch}, {n}], not {list(row.shape)}"
    if n > 1 and row.strides[-1] != 1:
        return "a row operand must be contiguous"
    if n * size % _ALIGNMENT or row.start % _ALIGNMENT or _row_stride(row) % _ALIGNMENT:
        return "a row operand's rows must start and end at multiples of 16 bytes"
    return None


def _row_stride(row: View) -> int:
    """Bytes from one batch to the next."""
    return row.strides[0] * row.dtype.itemsize if len(row.shape) == 2 and row.shape[0] > 1 else 0


def _layouts(product: Product) -> _Layouts | str:
    a = _operand_layout(product.a, 2, "the left operand")
    b = _operand_layout(product.b, 1, "the right operand")
    c = map_layout(product.c, 2, "the result")
    tensor = map_layout(product.tensor, 2, "the tensor operand") if product.tensor else None
    for found in (a, b, c, tensor):
        if isinstance(found, str):
            return found
    return _Layouts(a[0], b[0], a[1], b[1], c, tensor)  # type: ignore[arg-type]


# ---- building ------------------------------------------------------------------------------------


def spec_of(product: Product, sm_count: int, tile: TileConfig | None = None) -> MatmulSpec:
    """The code that `product` needs, with the tile that the cost model prefers. Raises
    UnsupportedError with the sentence of `accepts`."""
    layouts = _layouts(product)
    reason = _refused(product, ARCH)
    if reason is not None or isinstance(layouts, str):
        raise UnsupportedError(reason or str(layouts))
    tile = tile or ranked_tiles(product.batch, product.m, product.n, product.k, sm_count)[0]
    dtype = product.a.dtype
    row = product.rows[0].dtype if product.rows else dtype
    tensor = product.tensor.dtype if product.tensor else dtype
    return MatmulSpec(
        dtype, layouts.a_major, layouts.b_major, product.epilogue, product.c.dtype, tile,
        row, tensor,
    )  # fmt: skip


def compile_matmul(kernel: MatmulKernel, *, debug: bool = False) -> cuda.Cubin:
    """Machine code of `kernel`, from the cache if there. Needs no GPU."""
    return cuda.compile_cubin(kernel.source, [kernel.name], ARCH, fast=kernel.fast, debug=debug)


@functools.cache
def _load(kernel: MatmulKernel, device: int, debug: bool) -> _Loaded:
    return _Loaded(kernel, device, debug)


class _Loaded:
    """A kernel on one device, allowed its shared memory."""

    def __init__(self, kernel: MatmulKernel, device: int, debug: bool) -> None:
        self.module = cuda.CudaModule(compile_matmul(kernel, debug=debug), [kernel.name], device)
        self.handle = self.module._kernels[kernel.name]._handle
        self.context = self.module._context
        with cuda._Current(self.context):
            _check(_entry_points().allow_shared(self.handle, _DYNAMIC_SHARED, kernel.shared_bytes),
                   f"asking for {kernel.shared_bytes} bytes of shared memory")  # fmt: skip


# ---- launching -----------------------------------------------------------------------------------

_MAP_BYTES, _MAPS = 128, 4  # of gemm.cuh's Args: a, b, c, tensor
_REST = struct.Struct(f"={2 * MAX_ROWS}q10i")  # row pointers, row strides, ten integers
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_TYPE = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128B, _PROMOTE_256B = 3, 3


class _Arguments:
    """One thread's copy of the parameter struct, and the pointers it holds."""

    def __init__(self) -> None:
        size = -(-(_MAPS * _MAP_BYTES + _REST.size) // 64) * 64  # the struct is aligned to 64
        self._room = ctypes.create_string_buffer(size + 63)
        start = -ctypes.addressof(self._room) % 64
        self.buffer = memoryview(self._room)[start : start + size]
        self.address = ctypes.addressof(self._room) + start
        self.params = (ctypes.c_void_p * 1)(self.address)
        self.pointers: tuple[int, ...] = ()


class Matmul:
    """A built product of fixed sizes and strides, launched with the addresses of its buffers."""

    def __init__(
        self,
        product: Product,
        device: int,
        *,
        tile: TileConfig | None = None,
        debug: bool = False,
        jitter: bool = False,
    ) -> None:
        sm_count: int = torch.cuda.get_device_properties(device).multi_processor_count
        spec = spec_of(product, sm_count, tile)
        if jitter:
            spec = replace(spec, jitter=True)
        self.product, self.kernel = product, emit_matmul(spec)
        self._loaded = _load(self.kernel, device, debug)
        layouts = _layouts(product)
        assert isinstance(layouts, _Layouts)
        self._maps = _map_plan(layouts, spec.tile)
        self._integers = integers(product, spec.tile, layouts)
        self._row_strides = [_row_stride(r) for r in product.rows] + [0] * MAX_ROWS
        self._starts = [v.start for v in (product.a, product.b, product.c)]
        self._starts.append(product.tensor.start if product.tensor else 0)
        self._starts += [r.start for r in product.rows]
        self.grid = min(self._integers[4], sm_count)
        self._local = threading.local()
        self._launch = cuda._launch_function()

    def aligned(self, *pointers: int) -> bool:
        """Whether buffers at these addresses can be read: all are multiples of 16."""
        return not functools.reduce(int.__or__, pointers, 0) % _ALIGNMENT

    def launch(
        self, a: int, b: int, c: int, stream: int, rows: Sequence[int] = (), tensor: int = 0
    ) -> None:
        """Enqueues the product. a, b, c, rows, tensor: addresses where the buffers start."""
        if self.grid == 0:
            return
        pointers = (a, b, c, tensor, *rows)
        arguments: _Arguments | None = getattr(self._local, "arguments", None)
        if arguments is None:
            arguments = self._local.arguments = _Arguments()
            with cuda._Current(self._loaded.context):
                self._address(arguments, pointers)
        elif pointers != arguments.pointers:
            self._address(arguments, pointers)
        status = self._enqueue(arguments, stream)
        if status == cuda._INVALID_CONTEXT:
            # A thread that has not yet touched CUDA, as autograd's workers may be.
            cuda._call(cuda._driver().cuCtxSetCurrent, self._loaded.context)
            status = self._enqueue(arguments, stream)
        _check(status, f"launching {self.kernel.name} on {self.grid} blocks")

    def _enqueue(self, arguments: _Arguments, stream: int) -> int:
        status: int = self._launch(
            self._loaded.handle, self.grid, 1, 1, THREADS, 1, 1, self.kernel.shared_bytes, stream,
            arguments.params, None,
        )  # fmt: skip
        return status

    def _address(self, arguments: _Arguments, pointers: tuple[int, ...]) -> None:
        """Writes `pointers` into the struct: new maps the first time, then new addresses."""
        if len(pointers) != len(self._starts):
            raise ValueError(f"{len(pointers) - 4} row operands for {len(self._starts) - 4}")
        old, arguments.pointers = arguments.pointers, ()  # unknown, should the driver refuse half-way
        for i, encode in enumerate(self._maps):
            if encode is None or (old and old[i] == pointers[i]):
                continue
            at, where = arguments.address + i * _MAP_BYTES, pointers[i] + self._starts[i]
            if old:
                _check(_entry_points().readdress(at, where), "re-addressing a tensor map")
            else:
                _check(encode(at, where), f"encoding tensor map {i} of {self.product}")
        rows = [p + s for p, s in zip(pointers[4:], self._starts[4:])]
        rows += [0] * (MAX_ROWS - len(rows))
        _REST.pack_into(arguments.buffer, _MAPS * _MAP_BYTES, *rows,
                        *self._row_strides[:MAX_ROWS], *self._integers)  # fmt: skip
        arguments.pointers = pointers


def integers(product: Product, tile: TileConfig, layouts: _Layouts) -> tuple[int, ...]:
    """The ten integers of Args: m, n, m_tiles, n_tiles, tiles, k_blocks, then the batch steps."""
    m_tiles, n_tiles = -(-product.m // tile.m), -(-product.n // tile.n)
    tiles, blocks = product.batch * m_tiles * n_tiles, -(-product.k // 64)
    if tiles >= 1 << 31:
        raise UnsupportedError(f"{tiles} tiles are more than the kernel counts to")
    steps = layouts.a.step, layouts.b.step, layouts.tensor.step if layouts.tensor else 0
    return product.m, product.n, m_tiles, n_tiles, tiles, blocks, *steps, 0


Encoder = Callable[[int, int], int]


def _map_plan(layouts: _Layouts, tile: TileConfig) -> list[Encoder | None]:
    """For a, b, c and the tensor operand: writes its map at one address for data at another."""
    a_rows = tile.m if layouts.a_major == "k" else 64
    b_rows = tile.n if layouts.b_major == "k" else 64
    plan = [_encoder(layouts.a, a_rows), _encoder(layouts.b, b_rows), _encoder(layouts.c, 64)]
    return [*plan, _encoder(layouts.tensor, 64) if layouts.tensor else None]


def _encoder(layout: MapLayout, rows: int) -> Encoder:
    extents = (ctypes.c_uint64 * 3)(*layout.extents)
    strides = (ctypes.c_uint64 * 2)(*layout.strides)
    box, ones = (ctypes.c_uint32 * 3)(*layout.box(rows)), (ctypes.c_uint32 * 3)(1, 1, 1)

    def encode(at: int, where: int) -> int:
        status: int = _entry_points().encode(
            at, _MAP_TYPE[layout.dtype], 3, where, extents, strides, box, ones,
            0, _SWIZZLE_128B, _PROMOTE_256B, 0,
        )  # fmt: skip
        return status

    return encode


@dataclass(frozen=True)
class _EntryPoints:
    encode: Any
    readdress: Any
    allow_shared: Any


@functools.cache
def _entry_points() -> _EntryPoints:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    encode = library.cuTensorMapEncodeTiled
    encode.argtypes = [pointer, number, word, pointer, pointer, pointer, pointer, pointer,
                       number, number, number, number]  # fmt: skip
    readdress = library.cuTensorMapReplaceAddress
    readdress.argtypes = [pointer, pointer]
    allow = library.cuFuncSetAttribute
    allow.argtypes = [pointer, number, number]
    for function in (encode, readdress, allow):
        function.restype = number
    return _EntryPoints(encode, readdress, allow)


def _check(status: int, doing: str) -> None:
    if status:
        raise cuda.DriverError(f"{doing} failed: {cuda._reason(status)}")
