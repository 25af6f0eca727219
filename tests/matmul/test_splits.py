"""When k is split and how, from sizes alone: no GPU needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from products import make

from megafuse.codegen.matmul import MAX_ROWS
from megafuse.codegen.tiles import (
    LEAST_BLOCKS,
    MOST_WORKSPACE,
    TILES,
    Cut,
    cycles,
    k_blocks,
    ranked,
    split_counts,
    whole_splits,
)
from megafuse.runtime.matmul import Matmul, cut_of, integers
from megafuse.runtime.product import Layouts, layouts_of, row_stride
from megafuse.runtime.split import Finish, finish_blocks, finish_numbers, sums

LARGE, MIDDLE, FLAT, SMALL = TILES
Size = tuple[int, int, int, int]


def runs(k: int, splits: int) -> list[range]:
    """The k-blocks of each split, as tile_at of block.cuh cuts them."""
    blocks = k_blocks(k)
    run = -(-blocks // splits)
    return [range(s * run, min(blocks, (s + 1) * run)) for s in range(splits)]


@pytest.mark.parametrize("k", [8, 64, 65, 512, 1000, 1024, 14_848, 100_000])
def test_splits_cover_k_once_and_none_is_empty(k: int) -> None:
    for wanted in [*range(1, 40), 131, 2000]:
        splits = whole_splits(k, wanted)
        found = runs(k, splits)
        assert 1 <= splits <= wanted and all(found)
        assert [b for run in found for b in run] == list(range(k_blocks(k)))
        assert len({len(run) for run in found[:-1]} | {len(found[0])}) == 1
        assert whole_splits(k, splits) == splits
        # No fewer splits would have runs as short.
        assert splits == 1 or len(runs(k, splits - 1)[0]) > len(found[0])


SIZES: list[Size] = [
    (1, 1408, 2048, 16_384), (1, 256, 256, 100_000), (1, 64, 128, 100_000), (1, 8, 8, 1 << 20),
    (4, 200, 248, 8192), (1, 4096, 4096, 4096), (64, 1024, 5120, 1280), (3, 1, 8, 8),
    (0, 64, 64, 4096), (1, 2048, 2048, 1 << 18),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bounds(size: Size) -> None:
    batch, m, n, k = size
    for tile in TILES:
        counts = split_counts(tile, *size, 132)
        assert counts[0] == 1
        for splits in counts[1:]:
            assert whole_splits(k, splits) == splits
            assert len(runs(k, splits)[0]) >= LEAST_BLOCKS
            assert 4 * splits * batch * m * n <= MOST_WORKSPACE
    assert {cut.tile for cut in ranked(*size, 132)} == set(TILES)


@pytest.mark.parametrize(
    "size,cut,gain",
    [
        ((1, 1408, 2048, 16_384), Cut(LARGE, 3), 1.2),  # 88 tiles on 132 multiprocessors
        ((1, 2048, 1408, 65_536), Cut(LARGE, 4), 1.2),
        ((1, 256, 256, 100_000), Cut(MIDDLE, 31), 15.0),
        ((1, 64, 128, 100_000), Cut(SMALL, 63), 30.0),
        ((16, 128, 128, 65_536), Cut(SMALL, 3), 2.0),
    ],
    ids=str,
)
def test_few_tiles_and_a_long_k_are_split(size: Size, cut: Cut, gain: float) -> None:
    assert ranked(*size, 132)[0] == cut
    one_pass = min(cycles(Cut(tile), *size, 132) for tile in TILES)
    assert one_pass > gain * cycles(cut, *size, 132)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 1024, 2048])
@pytest.mark.parametrize("factor", [2, 3])
def test_the_headline_products_stay_whole(rows: int, factor: int) -> None:
    d, h = 1280, 1280 * factor
    for m, n, k in ((rows, 2 * h, d), (rows, d, h), (rows, h, d), (h, d, rows), (d, 2 * h, rows),
                    (rows, d, 2 * h)):  # fmt: skip
        best = ranked(64, m, n, k, 132)[0]
        assert best.splits == 1
        assert rows < 1024 or best.tile == LARGE


@pytest.mark.parametrize(
    "size",
    [(1, 4096, 4096, 4096), (16, 512, 512, 4096), (1, 1280, 5120, 8192), (1, 1, 128, 64),
     (1, 768, 3072, 8192)],
)
def test_splits_that_would_not_pay(size: Size) -> None:
    assert ranked(*size, 132)[0].splits == 1


def test_what_the_kernels_are_told() -> None:
    case = make(2, 72, 136, 1288, epilogue="both", batch_inside=True, pitch=8, device="meta")
    product = case.product
    layouts = layouts_of(product)
    assert isinstance(layouts, Layouts)
    cut = cut_of(product, 132, SMALL, 4)  # of 21 k-blocks: 6, 6, 6, 3
    assert cut == Cut(SMALL, 4) and cut_of(product, 132, SMALL).splits == 1
    assert integers(product, cut, layouts) == (72, 136, 2, 2, 2 * 4 * 2 * 2, 21, 1, 1, 1, 4)
    assert sums(product, 4) == 4 * 2 * 72 * 136
    tensor = product.tensor
    assert tensor is not None and MAX_ROWS == 2
    assert finish_numbers(product, 4) == [
        0, 0, 0, 0, 0, row_stride(product.rows[0]), 0,
        2 * product.c.strides[0], 2 * product.c.strides[1],
        2 * tensor.strides[0], 2 * tensor.strides[1], 2, 72, 136, 4,
    ]  # fmt: skip
    assert finish_blocks(product) == 2 * 72 * 136 // 256 + 1


def test_the_second_kernel_gets_addresses() -> None:
    product = make(1, 72, 136, 1288, epilogue="both", device="meta").product
    launched: list[Any] = []
    module = SimpleNamespace(launch=lambda *args: launched.append(args))
    finish = Finish(module, "f", product, 4)  # type: ignore[arg-type]
    finish.launch(0x1000, 0x2000, 0x3000, [0x4000], 5)
    name, grid, threads, args, stream = launched[0]
    assert (name, grid, threads, stream) == ("f", (finish_blocks(product), 1, 1), 64, 5)
    assert args[:5] == [0x1000, 0x2000, 0x3000, 0x4000, 0]
    with pytest.raises(ValueError, match="0 row operands for 1"):
        finish.launch(0x1000, 0x2000, 0x3000, [], 5)


def test_both_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from megafuse.runtime import matmul as runtime

    order: list[Any] = []

    def launch(config: Any, function: Any, params: Any, extra: Any) -> int:
        # The workspace stands where the first row operand else does; c and the rows are unknown.
        order.append(("product", ctypes.c_int64.from_address(params[0] + 512).value))
        return 0

    module = SimpleNamespace(launch=lambda *args: order.append(("finish", args[3][:4])),
                             entry=lambda name, *_: (98, bytes(56)))  # fmt: skip
    loaded = SimpleNamespace(handle=ctypes.c_void_p(99), context=None, module=module)
    maps: list[int] = []
    entry = SimpleNamespace(launch=launch, encode=lambda at, *rest: maps.append(rest[2]) or 0,
                            readdress=lambda at, where: maps.append(where) or 0)  # fmt: skip
    monkeypatch.setattr(runtime, "_load", lambda *_: loaded)
    monkeypatch.setattr(runtime, "_entry_points", lambda: entry)
    monkeypatch.setattr(runtime.cuda, "_Current", lambda _: _Nothing())
    monkeypatch.setattr("torch.cuda.get_device_properties",
                        lambda _: SimpleNamespace(multi_processor_count=132))  # fmt: skip
    matmul = Matmul(make(1, 256, 256, 100_000, epilogue="bias", device="meta").product, 0)
    assert matmul.cut == Cut(MIDDLE, 31) and matmul.sums == 31 * 256 * 256 and matmul.grid == 124
    matmul.launch(0x1000, 0x2000, 0x3000, 5, [0x4000], 0, 0x8000)
    matmul.launch(0x1000, 0x2000, 0x3000, 5, [0x4000], 0, 0x9000)
    assert maps == [0x1000, 0x2000]
    assert order == [
        ("product", 0x8000), ("finish", [0x8000, 0x3000, 0, 0x4000]),
        ("product", 0x9000), ("finish", [0x9000, 0x3000, 0, 0x4000]),
    ]  # fmt: skip
    first, second = matmul.launches(["a", "b", "c", None, "row"], 0x100)
    assert (first.function, second.function) == (99, 98)
    assert [(p.at, p.buffer, p.map) for p in first.patches if p.buffer is not None] == [
        (0, "a", True), (128, "b", True), (512, matmul, False)
    ]  # fmt: skip
    assert [(p.at, p.buffer) for p in second.patches] == [(0, matmul), (8, "c"), (24, "row")]


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_the_choice_names_the_split() -> None:
    text = Matmul.choose(make(1, 1408, 2048, 16_384, device="meta").product)
    assert text.startswith(
        "Hopper kernel, 128x256 tile, k in 3 splits, whose float32 sums (34.6 MB) a second kernel "
        "adds up: 264 pieces in 2 waves on 132 multiprocessors, predicted 21"
    ), text
    assert "(128x256 +" in text, text
