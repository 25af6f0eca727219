"""The kernel's own source on a CPU, small products in every layout: no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulation import run, run_tail
from products import make
from tails import make_tail

from megafuse.codegen.tiles import TILES

LARGE, MIDDLE, FLAT, SMALL = TILES
CASES: list[tuple[Any, int, tuple[int, int, int, int], dict[str, Any]]] = [
    # tile, blocks, (batch, m, n, k), how
    (SMALL, 2, (2, 72, 136, 72), {"majors": "mk", "epilogue": "both", "pitch": 8}),
    (SMALL, 1, (3, 7, 72, 8), {"majors": "kk", "epilogue": "bias", "batch_inside": True}),
    (SMALL, 1, (2, 72, 72, 77), {"majors": "mn", "epilogue": "bias", "pitch": 8}),
    (FLAT, 1, (2, 72, 264, 136), {"majors": "mn", "epilogue": "residual", "batch_inside": True}),
    (FLAT, 2, (2, 1, 40, 1288), {"epilogue": "both", "shared_b": True}),
    (MIDDLE, 2, (2, 136, 200, 200), {"majors": "mk", "epilogue": "gated"}),
    (MIDDLE, 1, (1, 200, 136, 24), {"majors": "mn", "dtype": torch.float16, "pitch": 24}),
    (LARGE, 2, (3, 136, 264, 960), {"majors": "kn", "epilogue": "both", "batch_inside": True}),
    (LARGE, 1, (2, 41, 520, 200), {"majors": "kk", "epilogue": "residual", "pitch": 8}),
    (LARGE, 1, (1, 264, 264, 72), {"epilogue": "bias", "row_dtype": torch.float32}),
    # Extents along the rows that end inside 16 bytes, NaN behind them.
    (SMALL, 2, (2, 70, 131, 77), {"majors": "kk"}),
    (MIDDLE, 2, (2, 133, 203, 99), {"majors": "mn", "epilogue": "bias"}),
    (LARGE, 2, (3, 135, 260, 201), {"majors": "kn", "batch_inside": True}),
]


@pytest.mark.parametrize("tile,blocks,size,how", CASES, ids=lambda v: str(v).replace(" ", ""))
def test_emulated(tile: Any, blocks: int, size: tuple[int, int, int, int], how: Any) -> None:
    case = make(*size, **how)
    for seed in (1, 2):  # of the moments at which copies land
        case.room.fill_(float("nan"))
        run(case.product, case.a, case.b, case.c, case.rows, case.tensor, tile, blocks, seed)
        assert case.mismatch() is None, case.mismatch()


# tile, blocks, splits, (batch, m, n, k), how
SPLIT: list[tuple[Any, int, int, tuple[int, int, int, int], dict[str, Any]]] = [
    (SMALL, 2, 2, (2, 72, 136, 200), {"majors": "mk", "epilogue": "both", "pitch": 8}),
    (SMALL, 3, 21, (1, 7, 72, 1288), {"majors": "kk", "epilogue": "bias"}),
    (SMALL, 2, 3, (2, 72, 72, 333), {"majors": "mn", "epilogue": "plain", "batch_inside": True}),
    (FLAT, 2, 3, (2, 72, 264, 260), {"majors": "mn", "dtype": torch.float16, "shared_b": True}),
    (MIDDLE, 2, 2, (2, 136, 200, 200), {"majors": "mk", "epilogue": "gated"}),
    (LARGE, 2, 3, (1, 136, 264, 960), {"epilogue": "residual", "batch_inside": True}),
    (LARGE, 1, 2, (2, 41, 264, 200), {"epilogue": "both", "row_dtype": torch.float32}),
    (SMALL, 2, 3, (2, 71, 131, 333), {"majors": "kn", "epilogue": "bias"}),
]


@pytest.mark.parametrize("tile,blocks,splits,size,how", SPLIT, ids=str)
def test_emulated_splits(
    tile: Any, blocks: int, splits: int, size: tuple[int, int, int, int], how: Any
) -> None:
    case = make(*size, **how)
    results = []
    for seed in (1, 2):
        case.room.fill_(float("nan"))
        operands = case.a, case.b, case.c, case.rows, case.tensor
        run(case.product, *operands, tile, blocks, seed, splits)
        assert case.mismatch() is None, case.mismatch()
        results.append(case.c.clone())
    assert torch.equal(*results)


# tile, blocks, tail, (batch, m, n, k), how
TAILED: list[tuple[Any, int, str, tuple[int, int, int, int], dict[str, Any]]] = [
    (SMALL, 2, "gate", (2, 72, 136, 72), {"majors": "mk", "epilogue": "bias"}),
    (SMALL, 1, "relu", (3, 7, 72, 8), {"majors": "kk"}),
    (FLAT, 2, "all", (2, 72, 264, 136), {"majors": "mn"}),
    (MIDDLE, 2, "gate", (2, 200, 136, 328), {"dtype": torch.float16}),
    (LARGE, 1, "relu", (1, 264, 264, 72), {"epilogue": "bias"}),
    (LARGE, 2, "gate", (3, 136, 264, 960), {"majors": "kn", "batch_inside": True}),
    (LARGE, 1, "all", (2, 41, 520, 200), {"majors": "kk", "shared_b": True}),
]


@pytest.mark.parametrize("tile,blocks,tail,size,how", TAILED, ids=str)
def test_emulated_tails(
    tile: Any, blocks: int, tail: str, size: tuple[int, int, int, int], how: Any
) -> None:
    case = make_tail(tail, size, **how)
    results = []
    for seed in (1, 2):
        case.clear()
        operands = [case.base.a, case.base.b]
        run_tail(case.product, operands, case.ins, case.outs, case.base.rows, case.sums, tile,
                 blocks, seed)  # fmt: skip
        assert case.mismatch() is None, case.mismatch()
        results.append([*(o.clone() for o in case.outs), case.sums.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
