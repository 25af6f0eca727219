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
        row, tensor, split=cut.splits > 1,
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


# ---- launching -----------------------------------------------------------------------------------

_MAP_BYTES, _MAPS = 128, 4  # of gemm.cuh's Args: a, b, c, tensor
_REST = struct.Struct(f"={2 * MAX_ROWS}q10i")  # row pointers, row strides, ten integers
_MAP_TYPE = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128B, _PROMOTE_256B = 3, 3


class _Call(Prepared):
    """One thread's launch, ready but for the stream and the pointers, and the pointers it holds."""

    def __init__(self, function: ctypes.c_void_p, config: bytes, rest: bytes) -> None:
        super().__init__(function, config, -(-(_MAPS * _MAP_BYTES + _REST.size) // 64) * 64)
        rows_at = self.address + _MAPS * _MAP_BYTES
        ctypes.memmove(rows_at, rest, len(rest))
        self.rows = (ctypes.c_int64 * MAX_ROWS).from_address(rows_at)
        self.pointers: tuple[int, ...] = ()


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
        self._maps = _map_plan(layouts, spec.tile)
        numbers = integers(product, cut, layouts)
        self.grid = min(numbers[4], sm_count)
        self._starts = [v.start for v in (product.a, product.b, product.c)]
        self._starts.append(product.tensor.start if product.tensor else 0)
        self._starts += [r.start for r in product.rows]
        strides = [row_stride(r) for r in product.rows]
        self._finish: Finish | None = None
        if self.kernel.finish is not None:
            # The first kernel then knows the operands and the workspace, the second all the rest.
            self._finish = Finish(self._loaded.module, self.kernel.finish, product, cut.splits)
            self._maps[2:] = [None, None]
            self._starts[2:], strides = [0, 0, 0], []
        strides += [0] * (MAX_ROWS - len(strides))
        self._rest = _REST.pack(*[0] * MAX_ROWS, *strides, *numbers)
        self._config = self._loaded.module.entry(self.kernel.name, (self.grid, 1, 1), THREADS)[1]
        self._calls = _Calls()
        self._mapped = [(i, i * _MAP_BYTES) for i, e in enumerate(self._maps) if e is not None]
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
        return (
            f"Hopper kernel, {best.tile} tile{split}: {pieces} {'pieces' if split else 'tiles'} in "
            f"{-(-pieces // sm_count)} waves on {sm_count} multiprocessors, predicted "
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
        if self.grid == 0:
            return
        call = self._calls.mine
        if call is None:
            call = self._calls.mine = _Call(self._loaded.handle, self._config, self._rest)
        finish = self._finish
        pointers = (a, b, c, tensor, *rows) if finish is None else (a, b, 0, 0, workspace)
        if pointers != call.pointers:
            self._address(call, pointers)
        call.stream.value = stream
        if status := self._launch(*call.arguments):
            self._launch_again(call, status)
        if finish is not None:
            finish.launch(workspace, c, tensor, rows, stream)

    def launches(self, buffers: Sequence[Any], somewhere: int) -> list[Launch]:
        """The same for `native.Queue`. buffers: what stands for a, b, c, tensor and rows; this
        object stands for the workspace. somewhere: any aligned address on the device, which the
        maps hold at first."""
        if self.grid == 0:
            return []
        call = _Call(self._loaded.handle, self._config, self._rest)
        self._encode(call, (somewhere,) * len(self._starts))
        finish = self._finish
        if finish is not None:
            a, b, c, tensor, *rows = buffers
            second = finish.prepared([self, c, tensor, *rows])
            buffers = [a, b, None, None, self]
        places = [(i, at, True) for i, at in self._mapped]
        places += [(i, _MAPS * _MAP_BYTES + 8 * (i - _MAPS), False)
                   for i in range(_MAPS, len(self._starts))]  # fmt: skip
        patches = [Patch(at, buffers[i], self._starts[i], map) for i, at, map in places]
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
        if len(pointers) != len(self._starts):
            raise ValueError(f"{len(pointers) - 4} row operands for {len(self._starts) - 4}")
        old, starts, start_of_maps = call.pointers, self._starts, call.address
        call.pointers = ()  # should the driver refuse half-way, everything is encoded again
        if not old:
            self._encode(call, pointers)
        else:
            for i, offset in self._mapped:
                if old[i] != pointers[i]:
                    status = self._readdress(start_of_maps + offset, pointers[i] + starts[i])
                    if status:
                        _check(status, "re-addressing a tensor map")
        for i in range(_MAPS, len(pointers)):
            call.rows[i - _MAPS] = pointers[i] + starts[i]
        call.pointers = pointers

    def _encode(self, call: _Call, pointers: tuple[int, ...]) -> None:
        with cuda._Current(self._loaded.context):
            for i, encode in enumerate(self._maps):
                if encode is not None:
                    at, where = call.address + i * _MAP_BYTES, pointers[i] + self._starts[i]
                    _check(encode(at, where), f"encoding tensor map {i} of {self.product}")


def integers(product: Product, cut: Cut, layouts: Layouts) -> tuple[int, ...]:
    """The ten integers of Args: m, n, m_tiles, n_tiles, pieces, k_blocks, three batch steps and
    splits."""
    m_tiles, n_tiles = -(-product.m // cut.tile.m), -(-product.n // cut.tile.n)
    pieces = cut.pieces(product.batch, product.m, product.n)
    if pieces >= 1 << 31:
        raise UnsupportedError(f"{pieces} tiles are more than the kernel counts to")
    steps = layouts.a.step, layouts.b.step, layouts.tensor.step if layouts.tensor else 0
    m, n, blocks = product.m, product.whole_n, k_blocks(product.k)
    return m, n, m_tiles, n_tiles, pieces, blocks, *steps, cut.splits


Encoder = Callable[[int, int], int]


def _map_plan(layouts: Layouts, tile: TileConfig) -> list[Encoder | None]:
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
