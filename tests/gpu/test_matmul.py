"""The Hopper product on the device, simplest first: a failure high up explains those below it.

Kernels are built with MF_DEBUG unless a test says otherwise: a wait that never ends stops after
seconds with an error, after which the process can use the GPU no more and the rest is skipped.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "matmul"))

from products import Case, make

from megafuse.codegen.matmul import TILES, TileConfig, emit_matmul, ranked_tiles
from megafuse.runtime.matmul import Matmul, accepts, compile_matmul, spec_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU: wgmma exists nowhere else")

LARGE, MIDDLE, FLAT, SMALL = TILES
SHORT: tuple[int, int, int, int] = (2, 200, 520, 136)
LONG: tuple[int, int, int, int] = (3, 1000, 1280, 1288)
MAJORS = ("kn", "kk", "mn", "mk")
Size = tuple[int, int, int, int]

# (tile or None for the preferred one, size, how), in order of what they need to work.
LADDER: list[tuple[TileConfig | None, Size, dict[str, Any]]] = [
    *[(tile, (1, tile.m, tile.n, 64), {"majors": m}) for tile in TILES for m in MAJORS],
    *[(tile, (1, tile.m, tile.n, 640), {}) for tile in TILES],
    *[(tile, SHORT, {"majors": m}) for tile in TILES for m in MAJORS],
    *[(tile, LONG, {"majors": m}) for tile in (LARGE, SMALL) for m in MAJORS],
    *[(tile, LONG, {"epilogue": e}) for tile in TILES for e in ("bias", "residual", "both")],
    *[(tile, SHORT, {"epilogue": "both"}) for tile in TILES],
    (LARGE, LONG, {"epilogue": "gated", "majors": "mk"}),
    (LARGE, LONG, {"epilogue": "both", "batch_inside": True}),
    (LARGE, LONG, {"epilogue": "both", "shared_b": True}),
    (LARGE, LONG, {"epilogue": "both", "row_dtype": torch.float32}),
    (LARGE, LONG, {"epilogue": "both", "dtype": torch.float16}),
    (MIDDLE, SHORT, {"majors": "mk", "dtype": torch.float16}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _usable(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"an earlier test left the GPU unusable: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Every kernel of the ladder, compiled in parallel."""
    if not HOPPER:
        return
    specs = set()
    for tile, size, how in LADDER:
        product = make(*size, **how).product
        specs.add(spec_of(product, 132, tile))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda s: compile_matmul(emit_matmul(s), debug=True), specs))


def launch(matmul: Matmul, case: Case) -> None:
    matmul.launch(
        case.a.data_ptr(), case.b.data_ptr(), case.c.data_ptr(),
        torch.cuda.current_stream().cuda_stream, [r.data_ptr() for r in case.rows],
        case.tensor.data_ptr() if case.tensor is not None else 0,
    )  # fmt: skip


def check(case: Case, tile: TileConfig | None = None, **build: Any) -> Matmul:
    assert accepts(case.product) is None
    matmul = Matmul(case.product, 0, tile=tile, **{"debug": True, **build})
    launch(matmul, case)
    torch.cuda.synchronize()
    wrong = case.mismatch()
    assert wrong is None, f"{matmul.kernel.name}: {wrong}"
    return matmul


@pytest.mark.parametrize("tile,size,how", LADDER, ids=lambda v: str(v).replace(" ", ""))
def test_ladder(tile: TileConfig | None, size: Size, how: dict[str, Any]) -> None:
    check(make(*size, device="cuda", **how), tile)


@pytest.mark.parametrize("m", [1, 7, 65, 1000])
@pytest.mark.parametrize("n", [8, 72, 1280])
def test_odd_sizes(m: int, n: int) -> None:
    for k in (8, 24, 64, 1288):
        check(make(3, m, n, k, device="cuda", epilogue="both"))
        check(make(3, m, n, k, device="cuda", majors="mk"))


@pytest.mark.parametrize("n", [250, 13, 1])
def test_columns_that_are_no_multiple_of_eight(n: int) -> None:
    check(make(2, 100, n, 72, device="cuda", epilogue="residual"))


def bits(case: Case, tile: TileConfig) -> torch.Tensor:
    case.room.fill_(float("nan"))
    check(case, tile, debug=False)
    return case.c.clone()


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_same_bits_every_time(tile: TileConfig) -> None:
    case = make(*LONG, device="cuda", epilogue="both")
    first = bits(case, tile)
    assert all(torch.equal(bits(case, tile), first) for _ in range(5))


def test_every_tile_gives_the_same_bits() -> None:
    case = make(*LONG, device="cuda", epilogue="both")
    first = bits(case, LARGE)
    assert [str(t) for t in TILES if not torch.equal(bits(case, t), first)] == []


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_random_delays_change_nothing(tile: TileConfig) -> None:
    for size, how in ((LONG, {"epilogue": "both"}), (SHORT, {"majors": "mk", "epilogue": "both"})):
        case = make(*size, device="cuda", **how)  # type: ignore[arg-type]
        for _ in range(3):
            case.room.fill_(float("nan"))
            check(case, tile, jitter=True)


def test_new_buffers_are_only_a_new_address() -> None:
    first, second = (make(*SHORT, device="cuda", epilogue="both", seed=s) for s in (1, 2))
    matmul = check(first)
    launch(matmul, second)  # one kernel, other tensors
    torch.cuda.synchronize()
    assert second.mismatch() is None, second.mismatch()

    errors: list[str | None] = []

    def work() -> None:
        first.room.fill_(float("nan"))
        launch(matmul, first)
        torch.cuda.synchronize()
        errors.append(first.mismatch())

    thread = threading.Thread(target=work)  # as autograd's workers do
    thread.start()
    thread.join()
    assert errors == [None]


def test_a_graph_replays_it() -> None:
    case = make(*SHORT, device="cuda", epilogue="both")
    matmul = check(case, debug=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(matmul, case)
    case.room.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert case.mismatch() is None, case.mismatch()


def test_alignment_is_judged_at_the_launch() -> None:
    matmul = Matmul(make(*SHORT).product, 0, debug=True)
    assert matmul.aligned(1 << 20, 4096, 16) and not matmul.aligned(1 << 20, 4098, 16)


def test_nothing_to_do() -> None:
    product = make(1, 64, 64, 64).product
    empty = replace(product, c=replace(product.c, shape=(0, 64, 64)),
                    a=replace(product.a, shape=(0, 64, 64)),
                    b=replace(product.b, shape=(0, 64, 64)))  # fmt: skip
    if accepts(empty) is None:
        Matmul(empty, 0, debug=True).launch(0, 0, 0, 0)


# The six products of the headline block, on fewer tokens: m, n, k and how.
ROWS, D, H = 1024, 1280, 2560
HEADLINE: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "z": (ROWS, 2 * H, D, {"majors": "kn", "batch_inside": True, "epilogue": "bias"}),
    "y": (ROWS, D, H, {"majors": "kn", "batch_inside": True, "epilogue": "both"}),
    "dh": (ROWS, H, D, {"majors": "kk", "batch_inside": True}),
    "dwout": (H, D, ROWS, {"majors": "mn"}),
    "dw1": (D, 2 * H, ROWS, {"majors": "mn", "batch_inside": True}),
    "dx": (ROWS, D, 2 * H, {"majors": "kk"}),
}


@pytest.mark.parametrize("name", HEADLINE)
def test_headline(name: str) -> None:
    m, n, k, how = HEADLINE[name]
    tile = ranked_tiles(64, m, n, k, 132)[0]
    assert tile == LARGE
    check(make(4, m, n, k, device="cuda", **how), tile, debug=False)
