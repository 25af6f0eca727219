"""A product on Hopper's tensor cores: build and launch.

The kernel is ``codegen.matmul``'s. Its parameter struct holds a tensor map for each operand, which
the driver encodes once for the sizes and then only re-addresses: a launch whose pointers are those
of the last one packs nothing.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megafuse.codegen.matmul import (
    ARCH,
    MAX_ROWS,
    THREADS,
    MatmulKernel,
    MatmulSpec,
    emit_matmul,
)
from megafuse.codegen.tiles import Cut, TileConfig, cycles, k_blocks, ranked, whole_splits
from megafuse.errors import UnsupportedError
from megafuse.fusion.tails import MOST_INS, MOST_OUTS, MOST_SUMS
from megafuse.runtime import cuda
from megafuse.runtime.launch import Prepared, entry_point
from megafuse.runtime.native import Launch, Patch
from megafuse.runtime.product import (
    ALIGNMENT,
    Layouts,
    MapLayout,
    Product,
    View,
    accepts,
    layouts_of,
    product_of,
    refused,
    row_stride,
)
from megafuse.runtime.split import Finish, sums

__all__ = ["Matmul", "Product", "View", "accepts", "compile_matmul", "product_of", "spec_of"]

# ---- building ------------------------------------------------------------------------------------


def cut_of(product: Product, sm_count: int, tile: TileConfig | None = None, splits: int = 1) -> Cut:
    """How `product` is cut: as `tile` and `splits` say, or as the cost model prefers."""
    if tile is None:
        return ranked(product.batch, product.m, product.n, product.k, sm_count)[0]
    return Cut(tile, whole_splits(product.k, splits))


def spec_of(product: Product, cut: Cut) -> MatmulSpec:
    """The code that `product` needs. Raises UnsupportedError with the sentence of `accepts`."""
    layouts = layouts_of(product)
    reason = refused(product, ARCH)
    if reason is not None or isinstance(layouts, str):
        raise UnsupportedError(reason or str(layouts))
    dtype = product.a.dtype
    row = product.rows[0].dtype if product.rows else dtype
    tensor = product.tensor.dtype if product.tensor else dtype
    return MatmulSpec(
        dtype, layouts.a_major, layouts.b_major, product.epilogue, product.c.dtype, cut.tile,
        row, tensor, split=cut.splits > 1, tail=product.tail,
    )  # fmt: skip


def compile_matmul(kernel: MatmulKernel, *, debug: bool = False) -> cuda.Cubin:
    """Machine code of `kernel`, from the cache if there. Needs no GPU."""
    return cuda.compile_cubin(kernel.source, kernel.names, ARCH, fast=kernel.fast, debug=debug)


@functools.cache
def _load(kernel: MatmulKernel, device: int, debug: bool, serial: bool) -> _Loaded:
    return _Loaded(kernel, device, debug, serial)


class _Loaded:
    """A product's kernels on one device, the first allowed its shared memory."""

    def __init__(self, kernel: MatmulKernel, device: int, debug: bool, serial: bool) -> None:
        cubin, shared = compile_matmul(kernel, debug=debug), {kernel.name: kernel.shared_bytes}
        self.module = cuda.CudaModule(cubin, kernel.names, device, shared, serial)
        self.handle = self.module._kernels[kernel.name].handle
        self.context = self.module._context


Encoder = Callable[[int, int], int]
"""Writes a tensor map at one address for data at another; a status."""

# ---- launching -----------------------------------------------------------------------------------

_MAP_BYTES, _MAPS = 128, 4  # of gemm.cuh's Args: a, b, c, tensor
_REST = struct.Struct(f"={2 * MAX_ROWS}q10i")  # row pointers, row strides, ten integers
_ROWS_AT = _MAPS * _MAP_BYTES
_ARGS_BYTES = -(-(_ROWS_AT + _REST.size) // 64) * 64
# TailArgs: Args, the maps of further operands and results, column sums' places, batch steps.
_OUTS_AT = _ARGS_BYTES + (MOST_INS - 1) * _MAP_BYTES
_SUMS_AT = _OUTS_AT + (MOST_OUTS - 1) * _MAP_BYTES
_STEPS = struct.Struct(f"={MOST_INS}i")  # and the pieces of a tile that go with a k-block
_TAIL_BYTES = -(-(_SUMS_AT + 8 * MOST_SUMS + _STEPS.size) // 64) * 64
_MAP_TYPE = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE, _PROMOTE_256B = {64: 2, 128: 3}, 3


class _Call(Prepared):
    """One thread's launch, ready but for the stream and the pointers, and the pointers it holds."""

    def __init__(self, function: ctypes.c_void_p, config: bytes, args: bytes) -> None:
        super().__init__(function, config, len(args))
        ctypes.memmove(self.address, args, len(args))
        self.pointers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a pointer goes in the parameters: `start` bytes further than given, into the tensor
    map at `at` that `encoder` made, or as it is."""

    at: int
    start: int
    encoder: Encoder | None = None


class _Calls(threading.local):
    """Forward and backward run in different threads."""

    mine: _Call | None = None


class Matmul:
    """A built product of fixed sizes and strides, launched with the addresses of its buffers.

    sums: float32 elements of the workspace that a launch needs; 0 unless k is split.
    """

    def __init__(
        self,
        product: Product,
        device: int,
        *,
        tile: TileConfig | None = None,
        splits: int = 1,
        debug: bool = False,
        jitter: bool = False,
        serial: bool = False,
    ) -> None:
        """tile, splits: how to cut the product; the cost model decides where no tile is given."""
        sm_count: int = torch.cuda.get_device_properties(device).multi_processor_count
        cut = cut_of(product, sm_count, tile, splits)
        spec = spec_of(product, cut)
        if jitter:
            spec = replace(spec, jitter=True)
        self.product, self.cut, self.kernel = product, cut, emit_matmul(spec)
        self.sums = sums(product, cut.splits) if spec.split else 0
        self._loaded = _load(self.kernel, device, debug, serial)
        layouts = layouts_of(product)
        assert isinstance(layouts, Layouts)
        self.grid = min(cut.pieces(product.batch, product.m, product.n), sm_count)
        self._finish: Finish | None = None
        if self.kernel.finish is not None:
            # The first kernel then knows the operands and the workspace, the second all the rest.
            self._finish = Finish(self._loaded.module, self.kernel.finish, product, cut.splits)
        self._places = places(product, layouts, spec)
        """Of a, b, c, tensor, rows; with a tail of a, b, outs, ins, rows, column sums."""
        self._args = parameters(product, cut, layouts, spec)
        self._config = self._loaded.module.entry(self.kernel.name, (self.grid, 1, 1), THREADS)[1]
        self._calls = _Calls()
        self._launch, self._readdress = _entry_points().launch, _entry_points().readdress

    @staticmethod
    def choose(product: Product, arch: str = ARCH, sm_count: int = 132) -> str:
        """What becomes of `product`, for people to read: the tile with the predictions it won by,
        or why torch computes it. Needs no GPU."""
        if reason := accepts(product, arch):
            return f"torch: {reason}"
        size = product.batch, product.m, product.n, product.k
        best, *others = ranked(*size, sm_count)
        pieces = best.pieces(product.batch, product.m, product.n)
        time = cycles(best, *size, sm_count) or 1.0
        one_pass = [Cut(best.tile)] if best.splits > 1 else []
        behind = (
            f"{c} {100 * (cycles(c, *size, sm_count) / time - 1):+.0f} %"
            for c in (*one_pass, *others)
        )
        split = ""
        if best.splits > 1:
            megabytes = 4 * sums(product, best.splits) / 1e6
            split = (
                f", k in {best.splits} splits, whose float32 sums ({megabytes:.3g} MB) a second "
                "kernel adds up"
            )
        tail = ""
        if product.tail is not None:
            tail = ", what follows done on its tiles"
            if best.splits > 1:
                tail = ", what follows in a kernel of its own"
        return (
            f"Hopper kernel, {best.tile} tile{split}{tail}: {pieces} "
            f"{'pieces' if split else 'tiles'} in {-(-pieces // sm_count)} waves on {sm_count} "
            "multiprocessors, predicted "
            f"{time / 1e3:.0f} thousand cycles ({', '.join(behind)})"
        )

    def aligned(self, *pointers: int) -> bool:
        """Whether buffers at these addresses can be read: all are multiples of 16."""
        return not functools.reduce(int.__or__, pointers, 0) % ALIGNMENT

    def launch(
        self, a: int, b: int, c: int, stream: int, rows: Sequence[int] = (), tensor: int = 0,
        workspace: int = 0,
    ) -> None:  # fmt: skip
        """Enqueues the product. All but the stream are addresses where the buffers start;
        workspace: of `sums` float32 elements, whatever they hold."""
        finish = self._finish
        pointers = (a, b, c, tensor, *rows) if finish is None else (a, b, 0, 0, workspace)
        self.launch_at(pointers, stream)
        if finish is not None and self.grid:
            finish.launch(workspace, c, tensor, rows, stream)

    def launch_at(self, pointers: tuple[int, ...], stream: int) -> None:
        """Enqueues the first kernel. pointers: addresses in the order of its operands: a, b, the
        results, the tensors that come in, rows, places of column sums."""
        if self.grid == 0:
            return
        call = self._calls.mine
        if call is None:
            call = self._calls.mine = _Call(self._loaded.handle, self._config, self._args)
        if pointers != call.pointers:
            self._address(call, pointers)
        call.stream.value = stream
        if status := self._launch(*call.arguments):
            self._launch_again(call, status)

    def launches(self, buffers: Sequence[Any], somewhere: int) -> list[Launch]:
        """The same for `native.Queue`. buffers: what stands for the pointers of `launch_at`; where
        k is split for a, b, c, tensor and rows, and this object stands for the workspace.
        somewhere: any aligned address on the device, which the maps hold at first."""
        if self.grid == 0:
            return []
        call = _Call(self._loaded.handle, self._config, self._args)
        self._encode(call, (somewhere,) * len(self._places))
        finish = self._finish
        if finish is not None:
            a, b, c, tensor, *rows = buffers
            second = finish.prepared([self, c, tensor, *rows])
            buffers = [a, b, None, None, self]
        patches = [
            Patch(p.at, buffer, p.start, p.encoder is not None)
            for p, buffer in zip(self._places, buffers, strict=True) if p is not None
        ]  # fmt: skip
        what = f"{self.kernel.name} on {self.grid} blocks"
        handle = self._loaded.handle.value or 0
        first = Launch(what, handle, self._config, bytes(call.args), tuple(patches))
        return [first] if finish is None else [first, second]

    def _launch_again(self, call: _Call, status: int) -> None:
        """After a refusal: in a thread that has not yet touched CUDA, as autograd's workers may
        be, with the context made current; any other reason is an error."""
        if status == cuda.INVALID_CONTEXT:
            cuda._call(cuda._driver().cuCtxSetCurrent, self._loaded.context)
            status = self._launch(*call.arguments)
        if status:
            _check(status, f"launching {self.kernel.name} on {self.grid} blocks")

    def _address(self, call: _Call, pointers: tuple[int, ...]) -> None:
        """Writes `pointers` into the struct: new maps the first time, then new addresses."""
        if len(pointers) != len(self._places):
            raise ValueError(f"{len(pointers)} addresses for {len(self._places)} operands")
        old = call.pointers
        call.pointers = ()  # should the driver refuse half-way, everything is encoded again
        if not old:
            self._encode(call, pointers)
        else:
            for place, before, pointer in zip(self._places, old, pointers, strict=True):
                if place is None or before == pointer:
                    continue
                to, where = call.address + place.at, pointer + place.start
                if place.encoder is None:
                    ctypes.c_int64.from_address(to).value = where
                elif status := self._readdress(to, where):
                    _check(status, "re-addressing a tensor map")
        call.pointers = pointers

    def _encode(self, call: _Call, pointers: tuple[int, ...]) -> None:
        with cuda._Current(self._loaded.context):
            for i, (place, pointer) in enumerate(zip(self._places, pointers, strict=True)):
                if place is None:
                    continue
                to, where = call.address + place.at, pointer + place.start
                if place.encoder is None:
                    ctypes.c_int64.from_address(to).value = where
                else:
                    _check(place.encoder(to, where), f"encoding tensor map {i} of {self.product}")


def parameters(product: Product, cut: Cut, layouts: Layouts, spec: MatmulSpec) -> bytes:
    """The kernel's parameters, without addresses and tensor maps."""
    args = bytearray(_TAIL_BYTES if spec.tail else _ARGS_BYTES)
    strides = [] if spec.split else [row_stride(r) for r in product.rows]
    strides += [0] * (MAX_ROWS - len(strides))
    numbers = integers(product, cut, layouts)
    _REST.pack_into(args, _ROWS_AT, *[0] * MAX_ROWS, *strides, *numbers)
    if spec.tail:
        steps = [x.step for x in layouts.ins[1:]]
        steps += [0] * (MOST_INS - 1 - len(steps))
        pieces = -(-256 * cut.tile.width // 16 // max(1, k_blocks(product.k) - 1))
        _STEPS.pack_into(args, _SUMS_AT + 8 * MOST_SUMS, *steps, pieces)
    return bytes(args)


def places(product: Product, layouts: Layouts, spec: MatmulSpec) -> list[Place | None]:
    """In the order of the pointers of `Matmul.launch_at`; None: nothing is given there."""
    tile, tail = spec.tile, spec.tail

    def mapped(at: int, view: View, layout: MapLayout, rows: int = 64) -> Place:
        return Place(at, view.start, _encoder(layout, rows, 64))

    def staged(at: int, view: View, layout: MapLayout) -> Place:
        return Place(at, view.start, _encoder(layout, 64, spec.staging.columns))

    a_rows = tile.m if layouts.a_major == "k" else 64
    b_rows = tile.n if layouts.b_major == "k" else 64
    a = mapped(0, product.a, layouts.a, a_rows)
    b = mapped(_MAP_BYTES, product.b, layouts.b, b_rows)
    if spec.split:
        return [a, b, None, None, Place(_ROWS_AT, 0)]
    c_at, tensor_at = 2 * _MAP_BYTES, 3 * _MAP_BYTES
    rows = [Place(_ROWS_AT + 8 * i, r.start) for i, r in enumerate(product.rows)]
    if tail is None:
        tensor = None
        if product.tensor and layouts.tensor:
            tensor = mapped(tensor_at, product.tensor, layouts.tensor)
        return [a, b, mapped(c_at, product.c, layouts.c), tensor, *rows]
    outs_at = [c_at, *range(_OUTS_AT, _SUMS_AT, _MAP_BYTES)]
    ins_at = [tensor_at, *range(_ARGS_BYTES, _OUTS_AT, _MAP_BYTES)]
    outs = map(staged, outs_at, product.outs, layouts.outs)
    ins = map(staged, ins_at, product.ins, layouts.ins)
    apart = partials(product) * product.n * 4
    column_sums = [Place(_SUMS_AT + 8 * i, i * apart) for i in range(tail.sums)]
    return [a, b, *outs, *ins, *rows, *column_sums]


def partials(product: Product) -> int:
    """Rows of float32 partial sums that a tail writes for each column sum, batch by batch: one for
    64 rows. The sums follow one another in one workspace."""
    return product.batch * -(-product.m // 64)


def integers(product: Product, cut: Cut, layouts: Layouts) -> tuple[int, ...]:
    """The ten integers of Args: m, n, m_tiles, n_tiles, pieces, k_blocks, three batch steps and
    splits."""
    m_tiles, n_tiles = -(-product.m // cut.tile.m), -(-product.n // cut.tile.n)
    pieces = cut.pieces(product.batch, product.m, product.n)
    if pieces >= 1 << 31:
        raise UnsupportedError(f"{pieces} tiles are more than the kernel counts to")
    tensor = layouts.tensor or next(iter(layouts.ins), None)
    steps = layouts.a.step, layouts.b.step, tensor.step if tensor else 0
    m, n, blocks = product.m, product.whole_n, k_blocks(product.k)
    return m, n, m_tiles, n_tiles, pieces, blocks, *steps, cut.splits


def _encoder(layout: MapLayout, rows: int, columns: int) -> Encoder:
    """For boxes of `rows` x `columns`, whose rows are swizzled over their whole length."""
    extents = (ctypes.c_uint64 * 3)(*layout.extents)
    strides = (ctypes.c_uint64 * 2)(*layout.strides)
    box, ones = (ctypes.c_uint32 * 3)(columns, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    swizzle = _SWIZZLE[2 * columns]

    def encode(at: int, where: int) -> int:
        status: int = _entry_points().encode(
            at, _MAP_TYPE[layout.dtype], 3, where, extents, strides, box, ones,
            0, swizzle, _PROMOTE_256B, 0,
        )  # fmt: skip
        return status

    return encode


@dataclass(frozen=True)
class _EntryPoints:
    launch: Any
    encode: Any
    readdress: Any


@functools.cache
def _entry_points() -> _EntryPoints:
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    encode = entry_point("cuTensorMapEncodeTiled")
    encode.argtypes = [pointer, number, word, pointer, pointer, pointer, pointer, pointer,
                       number, number, number, number]  # fmt: skip
    readdress = entry_point("cuTensorMapReplaceAddress")
    readdress.argtypes = [pointer, pointer]
    return _EntryPoints(entry_point("cuLaunchKernelEx"), encode, readdress)


def _check(status: int, doing: str) -> None:
    if status:
        raise cuda.DriverError(f"{doing} failed: {cuda._reason(status)}")
