"""The Hopper product on the device, simplest first: a failure high up explains those below it.

Kernels are built with MF_DEBUG unless a test says otherwise: a wait that never ends stops after
seconds with an error, after which the process can use the GPU no more and the rest is skipped.
Building is what takes the time here: tests share the builds in BUILDS and that of LARGE, "both".
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "matmul"))

from products import Case, make

import megafuse
from megafuse.codegen.tiles import TILES, Cut, TileConfig, ranked
from megafuse.runtime import executor
from megafuse.runtime.matmul import Matmul, accepts

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU: wgmma exists nowhere else")

Size = tuple[int, int, int, int]
LARGE, MIDDLE, FLAT, SMALL = TILES
# Both give some blocks three tiles or more, one after the other; every extent ends inside a tile.
SHORT: Size = (100, 136, 264, 72)
LONG: Size = (7, 1000, 1288, 1288)

MAJORS, EPILOGUES = ("kn", "kk", "mn", "mk"), ("plain", "bias", "residual", "both")
# Sixteen builds in which any two of tile, majors and epilogue meet.
BUILDS = [
    (tile, MAJORS[i], EPILOGUES[(t + i) % 4]) for i, (t, tile) in
    combinations(range(4), enumerate(TILES))
]  # fmt: skip

# (tile, size, how), in order of what they need to work.
LADDER: list[tuple[TileConfig, Size, dict[str, Any]]] = [
    *[(t, (1, t.m, t.n, k), {"majors": m, "epilogue": e}) for k in (64, 640) for t, m, e in BUILDS],
    *[(t, SHORT, {"majors": m, "epilogue": e, "pitch": 8}) for t, m, e in BUILDS],
    *[(t, LONG, {"majors": m, "epilogue": e}) for t, m, e in BUILDS],
    (LARGE, LONG, {"epilogue": "both", "majors": "mk", "batch_inside": True}),
    (LARGE, LONG, {"epilogue": "both", "majors": "mk", "shared_b": True}),
    (LARGE, LONG, {"epilogue": "gated", "majors": "mk"}),
    (LARGE, LONG, {"epilogue": "both", "row_dtype": torch.float32}),
    (LARGE, LONG, {"epilogue": "both", "dtype": torch.float16}),
    (MIDDLE, SHORT, {"majors": "mk", "dtype": torch.float16}),
]


@pytest.fixture(autouse=True)
def _usable() -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"an earlier test left the GPU unusable: {str(error).splitlines()[0]}")


def launch(matmul: Matmul, case: Case) -> None:
    sums = torch.full((matmul.sums,), float("nan"), device="cuda")
    matmul.launch(
        case.a.data_ptr(), case.b.data_ptr(), case.c.data_ptr(),
        torch.cuda.current_stream().cuda_stream, [r.data_ptr() for r in case.rows],
        case.tensor.data_ptr() if case.tensor is not None else 0, sums.data_ptr(),
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
def test_ladder(tile: TileConfig, size: Size, how: dict[str, Any]) -> None:
    check(make(*size, device="cuda", **how), tile)


@pytest.mark.parametrize("tile,majors,epilogue", BUILDS, ids=str)
def test_odd_sizes(tile: TileConfig, majors: str, epilogue: str) -> None:
    """An extent that counts rows may be anything, one that runs along them a multiple of 8."""
    rows_m, rows_k = (1, 7, 65, 1000), (1, 13, 66, 1287)
    for n in (8, 72, 1280):
        for m, k in zip(
            rows_m if majors[0] == "k" else (8, 16, 72, 1000),
            rows_k if majors == "mn" else (8, 24, 64, 1288),
        ):
            check(make(3, m, n, k, device="cuda", majors=majors, epilogue=epilogue), tile)


@pytest.mark.parametrize("tile,majors,epilogue", BUILDS, ids=str)
def test_rows_that_end_inside_16_bytes(tile: TileConfig, majors: str, epilogue: str) -> None:
    """Behind them is NaN in what is read, and of the result nothing but the piece's rest is
    written. A tensor operand is for whole pieces only."""
    epilogue = {"residual": "plain", "both": "bias"}.get(epilogue, epilogue)
    for m, n, k in ((131, 257, 77), (1001, 1283, 333), (70, 66, 1025)):
        check(make(3, m, n, k, device="cuda", majors=majors, epilogue=epilogue), tile)
        if k > 1000:
            check(make(3, m, n, k, device="cuda", majors=majors, epilogue=epilogue), tile, splits=2)


def bits(case: Case, tile: TileConfig) -> torch.Tensor:
    case.room.fill_(float("nan"))
    check(case, tile, debug=False)
    return case.c.clone()


def test_the_same_bits_every_time_from_every_tile() -> None:
    case = make(*LONG, device="cuda", epilogue="both")
    first = bits(case, LARGE)
    different = [str(t) for t in TILES for _ in range(5) if not torch.equal(bits(case, t), first)]
    assert different == []


@pytest.mark.parametrize(
    "tile,majors", [(LARGE, "kn"), (MIDDLE, "mk"), (FLAT, "mk"), (SMALL, "kn")], ids=str
)
def test_random_delays_change_nothing(tile: TileConfig, majors: str) -> None:
    for size in (LONG, SHORT):
        case = make(*size, device="cuda", majors=majors, epilogue="both")
        for _ in range(3):
            case.room.fill_(float("nan"))
            check(case, tile, jitter=True)


def test_new_buffers_are_only_a_new_address() -> None:
    first, second = (make(*SHORT, device="cuda", epilogue="both", seed=s) for s in (1, 2))
    matmul = check(first, LARGE, debug=False)
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


def test_another_stream() -> None:
    case = make(*SHORT, device="cuda", epilogue="both")
    matmul = check(case, LARGE, debug=False)
    case.room.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        launch(matmul, case)
    assert not stream.query(), "it did not wait for what its stream did before"
    stream.synchronize()
    assert case.mismatch() is None, case.mismatch()


def test_a_graph_replays_it() -> None:
    case = make(*SHORT, device="cuda", epilogue="both")
    matmul = check(case, LARGE, debug=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(matmul, case)
    case.room.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert case.mismatch() is None, case.mismatch()


def test_alignment_is_judged_at_the_launch() -> None:
    matmul = Matmul(make(*SHORT, device="meta").product, 0, tile=LARGE, debug=True)
    assert matmul.aligned(1 << 20, 4096, 16) and not matmul.aligned(1 << 20, 4098, 16)


def test_nothing_to_do() -> None:
    product = make(1, 64, 64, 64, device="meta").product
    empty = replace(product, c=replace(product.c, shape=(0, 64, 64)),
                    a=replace(product.a, shape=(0, 64, 64)),
                    b=replace(product.b, shape=(0, 64, 64)))  # fmt: skip
    assert accepts(empty) is None
    Matmul(empty, 0, tile=LARGE, debug=True).launch(0, 0, 0, 0)


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
    cut = ranked(64, m, n, k, 132)[0]
    assert cut == Cut(LARGE)
    check(make(4, m, n, k, device="cuda", **how), cut.tile, debug=False)


# ---- k in splits ---------------------------------------------------------------------------------

F16 = torch.float16
# (tile, splits, size, how): one split's blocks after another's in one block of the grid, runs of
# unequal length, extents that end inside a tile.
SPLIT: list[tuple[TileConfig, int, Size, dict[str, Any]]] = [
    *[(t, 2, (1, t.m, t.n, 128), {}) for t in TILES],
    *[(t, 3, (1, t.m, t.n, 1000), {"epilogue": "bias"}) for t in TILES],
    *[(t, 5, (7, 328, 392, 1288), {"epilogue": "both", "majors": "mn"}) for t in TILES],
    (LARGE, 5, (3, 137, 264, 1320), {"epilogue": "both", "majors": "kk", "batch_inside": True}),
    (LARGE, 20, (2, 1, 8, 1280), {"epilogue": "both", "pitch": 8}),
    (MIDDLE, 4, (3, 200, 328, 1001), {"epilogue": "residual", "majors": "mn"}),
    (MIDDLE, 4, (3, 200, 328, 1001), {"epilogue": "both", "majors": "mn", "dtype": F16}),
    (FLAT, 21, (2, 65, 72, 1288), {"epilogue": "gated", "shared_b": True}),
    (SMALL, 17, (5, 7, 72, 1288), {"epilogue": "both", "row_dtype": torch.float32}),
    (SMALL, 33, (1, 63, 136, 8192), {"dtype": F16, "majors": "kk"}),
]


@pytest.mark.parametrize("tile,splits,size,how", SPLIT, ids=lambda v: str(v).replace(" ", ""))
def test_splits(tile: TileConfig, splits: int, size: Size, how: dict[str, Any]) -> None:
    case = make(*size, device="cuda", **how)
    matmul = check(case, tile, splits=splits)
    assert matmul.cut.splits > 1
    first = case.c.clone()
    case.room.fill_(float("nan"))
    launch(matmul, case)
    torch.cuda.synchronize()
    assert torch.equal(case.c, first)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_random_delays_change_nothing_in_splits(tile: TileConfig) -> None:
    case = make(7, 328, 392, 1288, device="cuda", majors="mn", epilogue="both")
    for splits in (2, 5):
        for _ in range(3):
            case.room.fill_(float("nan"))
            check(case, tile, splits=splits, jitter=True)


@pytest.mark.parametrize(
    "size",
    [(1, 1408, 2048, 16_384), (1, 256, 256, 100_000), (1, 64, 128, 100_000), (4, 256, 256, 8192)],
    ids=str,
)
def test_products_that_are_split(size: Size) -> None:
    """As the cost model has it, and in another module the same bits."""
    for dtype in (torch.bfloat16, F16):
        case = make(*size, device="cuda", majors="mn", epilogue="bias", dtype=dtype)
        matmul = check(case, debug=False)
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        assert matmul.cut == ranked(*size, sm_count)[0] and matmul.cut.splits > 1
        first = case.c.clone()
        case.room.fill_(float("nan"))
        check(case, debug=False)
        assert torch.equal(case.c, first)


def test_a_graph_replays_a_split_product() -> None:
    case = make(4, 256, 256, 8192, device="cuda", majors="mn", epilogue="both")
    matmul = check(case, debug=False)
    assert matmul.sums
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(matmul, case)
    case.room.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert case.mismatch() is None, case.mismatch()


def test_a_weight_gradient_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a plan: the executor makes the workspace."""
    cuts: list[Cut] = []

    class Noted(Matmul):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            cuts.append(self.cut)

    monkeypatch.setattr(executor, "Matmul", Noted)
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 248, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(65_536, 256, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(65_536, 248, device="cuda", dtype=torch.bfloat16)
    fused = megafuse.fuse(layer, x)
    found = []
    for _ in range(2):
        fused.zero_grad(set_to_none=True)
        fused(x).backward(upstream)
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    assert any(cut.splits > 1 for cut in cuts), cuts
    assert torch.equal(*found)
    want = upstream.double().T @ x.double()
    assert (found[0].double() - want).norm() <= 3e-3 * want.norm()
