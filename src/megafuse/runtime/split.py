"""The second kernel of a Hopper product whose k's are split: it adds up the splits' sums."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from megafuse.codegen.matmul import FINISH_LANES, FINISH_THREADS, MAX_ROWS
from megafuse.errors import UnsupportedError
from megafuse.runtime.cuda import CudaModule
from megafuse.runtime.native import Launch, Patch
from megafuse.runtime.product import Product, row_stride


def sums(product: Product, splits: int) -> int:
    """float32 elements of the workspace [batch, splits, m, n]. Raises UnsupportedError for more
    than the second kernel's 32-bit indices reach."""
    count = splits * product.batch * product.m * product.whole_n
    if count >= 1 << 31:
        raise UnsupportedError(f"{count} sums of {splits} splits are more than can be indexed")
    return count


def finish_numbers(product: Product, splits: int) -> list[int]:
    """FinishArgs of finish.cuh as 8-byte members, with offsets where the addresses of the
    workspace, c, the tensor operand and the rows are to be added."""
    c, tensor, size = product.c, product.tensor, 2  # bytes of an element of either
    pad = [0] * (MAX_ROWS - len(product.rows))
    return [
        0, c.start, tensor.start if tensor else 0,
        *[r.start for r in product.rows], *pad, *[row_stride(r) for r in product.rows], *pad,
        c.strides[0] * size, c.strides[1] * size,
        *[s * size for s in (tensor.strides[:2] if tensor else (0, 0))],
        product.batch, product.m, product.whole_n, splits,
    ]  # fmt: skip


def finish_blocks(product: Product) -> int:
    """How many blocks add up the sums of `product`."""
    return -(-product.batch * product.m * product.whole_n // (FINISH_LANES * FINISH_THREADS))


class Finish:
    """The second kernel, loaded, for a product of fixed sizes and strides."""

    def __init__(self, module: CudaModule, name: str, product: Product, splits: int) -> None:
        self._module, self._name = module, name
        self._numbers = finish_numbers(product, splits)
        self._grid = finish_blocks(product), 1, 1
        self._rows = len(product.rows)

    def prepared(self, buffers: Sequence[Any]) -> Launch:
        """The same for `native.Queue`. buffers: what stands for workspace, c, tensor and rows."""
        numbers = self._numbers
        patches = [Patch(8 * i, b, numbers[i]) for i, b in enumerate(buffers) if b is not None]
        args = struct.pack(f"={len(numbers)}q", *numbers)
        entry = self._module.entry(self._name, self._grid, FINISH_THREADS)
        return Launch(f"{self._name} {self._grid}", *entry, args, tuple(patches))

    def launch(self, workspace: int, c: int, tensor: int, rows: Sequence[int], stream: int) -> None:
        """Enqueues it. All but the stream are addresses where the buffers start."""
        if len(rows) != self._rows:
            raise ValueError(f"{len(rows)} row operands for {self._rows}")
        args = list(self._numbers)
        for i, address in enumerate((workspace, c, tensor, *rows)):
            args[i] += address
        self._module.launch(self._name, self._grid, FINISH_THREADS, args, stream)
