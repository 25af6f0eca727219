"""Launching: what reaches the driver, what its refusals turn into; on a GPU, the real thing."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tile_examples as examples
from tile_checks import check_gate, check_mixing
from tile_examples import Shape

from megafuse.errors import ToolchainError
from megafuse.runtime import cuda

ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
PARAMS = ctypes.POINTER(ctypes.POINTER(ctypes.c_longlong))


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h declares it."""

    _fields_ = [
        ("geometry", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class FakeDriver:
    """Stands where cuLaunchKernelEx is: notes every call, answers what it was told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[int] = []
        self.attributes: list[bytes] = []
        self.entry = ENTRY(self._launch)

    def _launch(self, config: int, function: int, params: int, extra: int) -> int:
        c = Config.from_address(config)
        assert not extra and bool(c.attributes) == bool(c.count)
        if c.count:  # CUlaunchAttribute: which one, padding, its value
            self.attributes.append(ctypes.string_at(c.attributes, 72))
        args = ctypes.cast(params, PARAMS)[0][:3]
        self.calls.append((function, tuple(c.geometry), c.stream, args))
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "entry_point", lambda name: driver.entry)
    return driver


def module_of(kernel: cuda._Kernel) -> cuda.CudaModule:
    module = cuda.CudaModule.__new__(cuda.CudaModule)
    module._kernels, module._context = {"k": kernel}, object()
    return module


def test_a_launch_passes_the_args_struct_by_value(fake: FakeDriver) -> None:
    module = module_of(cuda._Kernel(1234))
    module.launch("k", (5, 6, 7), 320, [-1, 2**40, 3], 99)
    module.launch("k", (1, 2, 1), (32, 8, 1), [4, 5, 6], 0)
    thread = threading.Thread(target=module.launch, args=("k", (1, 1, 1), 32, [7, 8, 9], 1))
    thread.start()
    thread.join()
    assert fake.calls == [
        (1234, (5, 6, 7, 320, 1, 1, 0), 99, [-1, 2**40, 3]),
        (1234, (1, 2, 1, 32, 8, 1, 0), None, [4, 5, 6]),
        (1234, (1, 1, 1, 32, 1, 1, 0), 1, [7, 8, 9]),
    ]


def test_a_launch_may_start_before_its_predecessor_has_ended(fake: FakeDriver) -> None:
    module_of(cuda._Kernel(1234)).launch("k", (1, 1, 1), 32, [1, 2, 3], 0)
    assert fake.attributes == []
    module_of(cuda._Kernel(1234, early=True)).launch("k", (1, 1, 1), 32, [1, 2, 3], 0)
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert fake.attributes == [struct.pack("=I4xi60x", 6, 1)]


def test_refusals_have_names(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    module = module_of(cuda._Kernel(1))
    fake.answers = [701]
    with pytest.raises(cuda.DriverError, match=r"k .*LAUNCH_OUT_OF_RESOURCES \(701\)"):
        module.launch("k", (1, 1, 1), 1024, [1, 2, 3], 0)
    # A thread without a context gets one, and the launch is tried again.
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "_call", lambda *args: made.append(args))
    fake.answers = [cuda.INVALID_CONTEXT, 0]
    module.launch("k", (1, 1, 1), 1024, [1, 2, 3], 0)
    assert len(fake.calls) == 3 and made[0][1] is module._context


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda._bindings.cache_clear()
    cuda._nvrtc_version.cache_clear()
    yield
    cuda._bindings.cache_clear()
    cuda._nvrtc_version.cache_clear()


def test_missing_bindings_say_what_to_install(no_bindings: None) -> None:
    with pytest.raises(ToolchainError, match=r"pip install megafuse\[cuda12\]"):
        cuda.compile_cubin("", [], "sm_90a")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(72, 8, 16, 2),
        Shape(7, 1, 8, 3),
        Shape(6, 2, 1, 4),
        Shape(512, 8, 32, 3),
        Shape(264, 4, 64, 2),
        Shape(2560, 8, 320),
        Shape(1281, 1, 672),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype,wide", [("float", False), ("float", True), ("bf16", False), ("f16", False)]
)
def test_the_gate_on_a_gpu(shape: Shape, dtype: str, wide: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def place(x: np.ndarray) -> np.ndarray:
        """Page-locked memory: the same address on the host and on the device."""
        room = torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        copy: np.ndarray = room.view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy

    source = examples.gate_forward(shape, dtype) + examples.gate_backward(shape, dtype)
    source += examples.mixing(Shape(80, 4, 32, 3), 4, "float")
    names = ["f3", "b3", "b3_finish", "f1"]
    module = cuda.build_cuda(source, names, fast=dtype != "float", wide=wide)

    def launch(name: str, args: Sequence[int]) -> None:
        grid, block = (-(-3 // shape.teams), 1, 1), (shape.team * shape.teams, 1, 1)
        if name == "b3_finish":
            grid, block = (3, 6, 1), (32, 8, 1)
        if name == "f1":
            grid, block = (2, 1, 1), (96, 1, 1)
        module.launch(name, grid, block, args, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    check_gate(launch, shape.columns, dtype, 11, 3, place, rounded_once=wide)
    check_mixing(launch, groups=5, tokens=4, columns=80, place=place)
