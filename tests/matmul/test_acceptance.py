"""What the Hopper product takes, what it refuses in which words, and what reaches the driver."""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from products import BIAS, BOTH, RESIDUAL, make

from megafuse.codegen.matmul import emit_matmul
from megafuse.codegen.tiles import TILES
from megafuse.errors import UnsupportedError
from megafuse.fusion.plan import MatmulRegion, Operand
from megafuse.runtime import matmul as runtime
from megafuse.runtime.cuda import DriverError
from megafuse.runtime.launch import Grid, config
from megafuse.runtime.matmul import cut_of, spec_of
from megafuse.runtime.product import (
    Layouts,
    MapLayout,
    Product,
    View,
    accepts,
    layouts_of,
    map_layout,
    product_of,
)

BF16 = torch.bfloat16
T, B, D, H = 64, 1024, 1280, 2560


def dense(*shape: int, dtype: torch.dtype = BF16) -> View:
    return View.of(torch.empty(shape, dtype=dtype, device="meta"))


def flipped(view: View, i: int, j: int) -> View:
    shape, strides = list(view.shape), list(view.strides)
    shape[i], shape[j], strides[i], strides[j] = shape[j], shape[i], strides[j], strides[i]
    return View(tuple(shape), tuple(strides), view.dtype, view.offset)


X, DY = flipped(dense(B, T, D), 0, 1), flipped(dense(B, T, D), 0, 1)
W1, WOUT, HID, DZ = dense(T, D, 2 * H), dense(T, H, D), dense(T, B, H), dense(T, B, 2 * H)


@pytest.mark.parametrize(
    "a,b,majors",
    [
        (X, W1, ("k", "mn")),
        (HID, WOUT, ("k", "mn")),
        (DY, flipped(WOUT, 1, 2), ("k", "k")),
        (flipped(HID, 1, 2), DY, ("mn", "mn")),
        (flipped(X, 1, 2), DZ, ("mn", "mn")),
        (DZ, flipped(W1, 1, 2), ("k", "k")),
    ],
)
def test_the_six_products_are_taken(a: View, b: View, majors: tuple[str, str]) -> None:
    product = Product(a, b, dense(T, a.shape[1], b.shape[2]))
    assert accepts(product) is None
    spec = spec_of(product, cut_of(product, 132))
    assert (spec.a_major, spec.b_major) == majors and spec.tile == TILES[0]


def test_a_map_is_extents_and_strides() -> None:
    assert map_layout(X, 2, "x") == MapLayout(BF16, (D, B, T), (T * D * 2, D * 2), 1)
    assert map_layout(flipped(X, 1, 2), 1, "x") == MapLayout(BF16, (D, B, T), (T * D * 2, D * 2), 1)
    padded = View((T, B, D), (B * (D + 8), D + 8, 1), BF16)  # rows with a pitch
    assert map_layout(padded, 2, "c") == MapLayout(
        BF16, (D, B, T), (2 * (D + 8), 2 * B * (D + 8)), 1
    )
    shared = View((T, D, H), (0, H, 1), BF16)
    assert map_layout(shared, 2, "w") == MapLayout(BF16, (H, D, 1), (H * 2, H * D * 2), 0)
    # A stride that is never taken may be anything: the map gets one that the driver allows.
    assert map_layout(View((1, 1, 24), (7, 3, 1), BF16), 2, "x") == MapLayout(
        BF16, (24, 1, 1), (48, 48), 0
    )


def test_what_is_refused_says_why() -> None:
    good = make(2, 64, 72, 80, epilogue="both").product
    assert accepts(good) is None
    c = good.c
    float32 = dense(2, 64, 80, dtype=torch.float32)
    row = good.rows[0]
    assert good.tensor is not None
    for product, words in (
        (replace(good, a=float32), "bfloat16 or float16, not torch.float32 by torch.bfloat16"),
        (replace(good, b=replace(good.b, dtype=torch.float16)), "not torch.bfloat16 by"),
        (replace(good, c=replace(c, dtype=torch.float32)), "writes bfloat16 or float16"),
        (replace(good, a=replace(good.a, offset=4)), "starts 8 bytes into its buffer"),
        (replace(good, a=View((2, 64, 80), (64 * 84, 84, 1), BF16)), "rows of the left operand"),
        (replace(good, a=View((2, 64, 80), (64 * 160, 160, 2), BF16)), "neither dimension"),
        (replace(good, b=View((2, 80, 72), (5764, 72, 1), BF16)), "batches of the right operand"),
        (replace(good, b=dense(2, 81, 72)), "no batched product"),
        (replace(good, c=View((2, 64, 72), (0, 72, 1), BF16)), "overlap"),
        (replace(good, c=View((2, 64, 72), (64 * 76, 76, 1), BF16)), "rows of the result"),
        (replace(good, rows=()), "do not match"),
        (replace(good, rows=(replace(row, offset=1),)), "multiples of 16 bytes"),
        (replace(good, rows=(View((2, 64), (64, 1), BF16),)), "shape [72] or [2, 72]"),
        (replace(good, tensor=replace(good.tensor, shape=(2, 64, 64))), "a tensor operand is"),
        (replace(good, epilogue=RESIDUAL * 2), "one tensor operand"),
        (Product(dense(1, 8, 0), dense(1, 0, 8), dense(1, 8, 8)), "no elements"),
    ):
        reason = accepts(product)
        assert reason is not None and words in reason, (words, reason)
        with pytest.raises(UnsupportedError):
            spec_of(product, cut_of(product, 132))
    assert "sm_80" in (accepts(good, "sm_80") or "")
    odd = make(2, 8, 12, 8, epilogue="bias").product
    assert accepts(odd) is None  # a padded row
    odd = replace(odd, rows=(View((2, 12), (12, 1), BF16),))
    assert "the rest of them" in (accepts(odd) or "")


@pytest.mark.parametrize(
    "size,majors,words",
    [
        ((2, 64, 250, 72), "kn", "rows of the right operand are 500 bytes apart"),
        ((2, 64, 250, 72), "kk", "rows of the result are 500 bytes long"),
        ((2, 64, 1, 72), "kk", "rows of the result are 2 bytes long"),
        ((2, 64, 256, 66), "kn", "rows of the left operand are 132 bytes apart"),
        ((2, 64, 256, 66), "mk", "rows of the right operand are 132 bytes apart"),
        ((2, 65, 256, 64), "mn", "rows of the left operand are 130 bytes apart"),
    ],
)
def test_rows_lie_at_multiples_of_16_bytes(
    size: tuple[int, int, int, int], majors: str, words: str
) -> None:
    """A row of the result also has the rest of its last 16 bytes to itself, and no more: what is
    behind may be somebody else's."""
    case = make(*size, majors=majors)
    views = case.a, case.b, case.c
    a, b, c = (View.of(torch.empty_like(x.contiguous())) for x in views)
    if majors[0] == "m":
        a = flipped(View.of(case.a.transpose(1, 2).contiguous()), 1, 2)
    if majors[1] == "k":
        b = flipped(View.of(case.b.transpose(1, 2).contiguous()), 1, 2)
    assert words in (accepts(Product(a, b, c)) or "")
    assert accepts(case.product) is None  # whose rows are padded
    wide = replace(case.product.c, strides=(64 * 512, 512, 1))
    assert (accepts(replace(case.product, c=wide)) is None) == (size[2] % 8 == 0)
    if size[2] % 8 == 0:  # the same extent is fine where it counts rows
        other = "mn" if size[3] % 8 else "kn"
        assert accepts(make(*size, majors=other).product) is None


def test_one_row() -> None:
    for size in ((3, 1, 8, 8), (1, 1, 8, 8), (2, 8, 8, 1)):
        assert accepts(make(*size, majors="mn" if size[3] == 1 else "kn").product) is None


def test_the_choice_says_why() -> None:
    text = runtime.Matmul.choose(Product(X, W1, dense(T, B, 2 * H)))
    assert text.startswith("Hopper kernel, 128x256 tile: 10240 tiles in 78 waves on 132 multip")
    assert all(f"{t} +" in text for t in TILES[1:]), text
    odd = Product(dense(4, 8, 8), dense(4, 8, 4), dense(4, 8, 4))
    assert runtime.Matmul.choose(odd) == f"torch: {accepts(odd)}"
    assert "this device is sm_80" in runtime.Matmul.choose(odd, "sm_80")
    assert "0 tiles in 0 waves" in runtime.Matmul.choose(
        Product(dense(0, 8, 8), dense(0, 8, 8), dense(0, 8, 8))
    )


def test_a_planned_region_is_a_product() -> None:
    rows = sympy.Symbol("s0", positive=True, integer=True)
    buffer = SimpleNamespace(dtype=BF16, shape=(rows, 4, 16))
    a = Operand(buffer, (4, rows, 16), (16, 64, 1), 0)  # type: ignore[arg-type]
    b = Operand(buffer, (4, 16, 8), (128, 8, 1), rows * 64)  # type: ignore[arg-type]
    node = SimpleNamespace(dtype=BF16, shape=(4, rows, 8), room=(4, rows, 8))
    product = product_of(MatmulRegion(node, a, b), {"s0": 24})  # type: ignore[arg-type]
    assert product.a == View((4, 24, 16), (16, 64, 1), BF16)
    assert product.b == View((4, 16, 8), (128, 8, 1), BF16, 24 * 64)
    assert product.c == dense(4, 24, 8) and accepts(product) is None


# ---- launching, with a driver that only takes notes ----------------------------------------------


class FakeDriver:
    """Stands where libcuda is."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.kernel_params, self.early = b"", 0
        self.refusals: list[int] = []

    def encode(self, at: int, *rest: Any) -> int:
        assert at % 64 == 0
        dtype, rank, where, extents, strides, box, ones, *modes = rest
        assert (rank, list(ones), modes) == (3, [1, 1, 1], [0, 3, 3, 0])
        self.calls.append(("encode", dtype, where, list(extents), list(strides), list(box)))
        return 0

    def readdress(self, at: int, where: int) -> int:
        assert at % 64 == 0
        self.calls.append(("readdress", where))
        return 0

    def launch(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        """As ctypes passes them on: each is already what the driver's prototype says."""
        assert len(config) == 56 and isinstance(function, ctypes.c_void_p) and not extra
        *numbers, stream, _, count = struct.unpack("=7I4x2QI4x", bytes(config))
        self.early = count
        self.calls.append(("launch", function.value, *numbers, stream))
        self.kernel_params = ctypes.string_at(params[0], 640)
        return self.refusals.pop() if self.refusals else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    class Loaded:
        handle, context = ctypes.c_void_p(99), None

        def __init__(self, kernel: Any, device: int, debug: bool, serial: bool) -> None:
            self.module, self.shared, self.early = self, kernel.shared_bytes, not serial

        def entry(self, name: str, grid: Grid, block: int) -> tuple[int, bytes]:
            return 99, config(grid, block, self.shared, self.early)

    class Current:
        def __init__(self, context: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(runtime, "_load", Loaded)
    monkeypatch.setattr(runtime, "_entry_points", lambda: fake)
    monkeypatch.setattr(runtime.cuda, "_Current", Current)
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return fake


def test_a_launch_for_the_native_loop(driver: FakeDriver) -> None:
    """Every address of the struct is a patch: maps by their starts, rows as numbers."""
    z = replace(dense(T, B, 2 * H), offset=8)
    matmul = runtime.Matmul(Product(X, W1, z, BIAS, (dense(T, 2 * H),)), 0)
    (launch,) = matmul.launches(["a", "b", "c", None, "row"], 0x100)
    assert [c[2] for c in driver.calls] == [0x100, 0x100, 0x110]
    patches = [(p.at, p.buffer, p.start, p.map) for p in launch.patches]
    assert patches == [
        (0, "a", 0, True), (128, "b", 0, True), (256, "c", 16, True), (512, "row", 0, False)
    ]  # fmt: skip
    assert launch.function == 99 and len(launch.args) % 64 == 0
    assert struct.unpack_from("=10i", launch.args, 544)[:2] == (B, 2 * H)


def test_maps_are_encoded_once_and_then_readdressed(driver: FakeDriver) -> None:
    z = replace(dense(T, B, 2 * H), offset=8)
    product = Product(X, W1, z, BIAS, (dense(T, 2 * H),))
    matmul = runtime.Matmul(product, 0)
    matmul.launch(0x1000, 0x2000, 0x3000, 5, [0x4000])
    assert driver.calls == [
        ("encode", 9, 0x1000, [D, B, T], [T * D * 2, D * 2], [64, 128, 1]),
        ("encode", 9, 0x2000, [2 * H, D, T], [4 * H, 4 * H * D], [64, 64, 1]),
        ("encode", 9, 0x3010, [2 * H, B, T], [4 * H, 4 * H * B], [64, 64, 1]),
        ("launch", 99, 132, 1, 1, 384, 1, 1, matmul.kernel.shared_bytes, 5),
    ]
    head = struct.unpack_from("=4q10i", driver.kernel_params, 512)
    assert head[:4] == (0x4000, 0, 4 * H, 0)
    assert head[4:] == (B, 2 * H, 8, 20, 8 * 20 * 64, 20, 1, 1, 0, 1)

    assert driver.early == 1
    driver.calls.clear()
    matmul.launch(0x1000, 0x2000, 0x3000, 0, [0x4000])
    assert [(c[0], c[-1]) for c in driver.calls] == [("launch", 0)]
    driver.calls.clear()
    matmul.launch(0x1000, 0x2000, 0x9000, 5, [0x5000])
    assert driver.calls[0] == ("readdress", 0x9010) and len(driver.calls) == 2
    assert struct.unpack_from("=q", driver.kernel_params, 512) == (0x5000,)

    driver.calls.clear()
    thread = threading.Thread(
        target=matmul.launch, args=(0x1000, 0x2000, 0x9000, 5, [0x5000])
    )  # another thread has maps of its own
    thread.start()
    thread.join()
    assert [c[0] for c in driver.calls] == ["encode"] * 3 + ["launch"]
    with pytest.raises(ValueError, match="4 addresses for 5 operands"):
        matmul.launch(0x1000, 0x2000, 0x9000, 5)


def test_the_tensor_operand_has_a_map_of_its_own(driver: FakeDriver) -> None:
    product = Product(HID, WOUT, dense(T, B, D), BOTH, (dense(T, D),), X)
    runtime.Matmul(product, 0).launch(0x1000, 0x2000, 0x3000, 0, [0x4000], 0x5000)
    encoded = ("encode", 9, 0x5000, [D, B, T], [T * D * 2, D * 2], [64, 64, 1])
    assert driver.calls[3] == encoded


def test_an_empty_batch_launches_nothing(driver: FakeDriver) -> None:
    product = Product(dense(0, 8, 8), dense(0, 8, 8), dense(0, 8, 8))
    assert accepts(product) is None
    runtime.Matmul(product, 0).launch(0, 0, 0, 0)
    assert driver.calls == []


def test_a_refused_launch(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[Any] = []
    monkeypatch.setattr(runtime.cuda, "_driver", lambda: SimpleNamespace(cuCtxSetCurrent=None))
    monkeypatch.setattr(runtime.cuda, "_call", lambda *_: made_current.append(1))
    monkeypatch.setattr(runtime.cuda, "_reason", lambda status: f"CUDA error {status}")
    matmul = runtime.Matmul(Product(X, W1, dense(T, B, 2 * H)), 0)
    driver.refusals = [201]  # no context in this thread: made current, then launched again
    matmul.launch(0x1000, 0x2000, 0x3000, 5)
    assert len(made_current) == 1 and [c[0] for c in driver.calls].count("launch") == 2
    driver.refusals = [700]
    with pytest.raises(DriverError, match="on 132 blocks failed: CUDA error 700"):
        matmul.launch(0x1000, 0x2000, 0x3000, 5)
    assert len(made_current) == 1


def test_the_struct_is_as_long_as_the_driver_copies() -> None:
    # Four maps, two pointers, two strides, ten integers, rounded up to its alignment of 64.
    product = Product(X, W1, dense(T, B, 2 * H))
    source = emit_matmul(spec_of(product, cut_of(product, 132))).source
    assert source.count("MAX_ROW_OPERANDS = 2") == 1
    cut = cut_of(product, 132)
    layouts = layouts_of(product)
    assert isinstance(layouts, Layouts)
    args = runtime.parameters(product, cut, layouts, spec_of(product, cut))
    call = runtime._Call(ctypes.c_void_p(99), bytes(56), args)
    end = call.address + 640
    assert call.address % 64 == 0
    assert end <= ctypes.addressof(call._room) + len(call._room)
