"""The GPU meaning of the tile words compiles for Hopper, in the registers it was designed for.

No GPU is needed: NVRTC writes machine code for sm_90a on any machine.
"""

from __future__ import annotations

import pytest
import tile_examples as examples
from tile_examples import Shape

from megafuse.errors import BuildError
from megafuse.runtime.cuda import Cubin, compile_cubin
from megafuse.runtime.host import build_host

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

ARCH = "sm_90a"


def assert_no_spills(cubin: Cubin) -> None:
    for name, kernel in cubin.resources.items():
        assert kernel.spill_stores == kernel.spill_loads == 0, f"{name}: {kernel}\n{cubin.log}"
    for line in cubin.log.splitlines():  # a register array with a run-time index has a stack frame
        assert "stack frame" not in line or " 0 bytes stack frame" in line, line


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2560, 8, 320, 1, 2),
        Shape(2560, 8, 160, 1, 2),
        Shape(2560, 8, 160, 1, 3),
        Shape(2560, 8, 160, 2, 1),
        Shape(3840, 8, 480, 1, 1),
        Shape(512, 8, 32, 4, 2),
        Shape(64, 8, 8, 32, 1),
    ],
    ids=str,
)
def test_gate_forward(shape: Shape, fast: bool) -> None:
    cubin = compile_cubin(examples.gate_forward(shape), ["f3"], ARCH, fast=fast)
    assert_no_spills(cubin)
    assert cubin.image[:4] == b"\x7fELF"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [Shape(2560, 8, 320, 1, 1), Shape(2560, 4, 640, 1, 1)], ids=str)
def test_gate_backward_with_six_column_sums(shape: Shape, fast: bool) -> None:
    cubin = compile_cubin(examples.gate_backward(shape), ["b3", "b3_finish"], ARCH, fast=fast)
    assert_no_spills(cubin)
    assert cubin.resources["b3_finish"].shared_bytes == 8 * 32 * (4 if fast else 8)


@pytest.mark.parametrize("shape", [Shape(1280, 8, 32, 8, 1), Shape(1280, 8, 160, 6, 1)], ids=str)
def test_group_with_two_stages(shape: Shape) -> None:
    assert_no_spills(compile_cubin(examples.mixing(shape, 64), ["f1"], ARCH, fast=True))


@pytest.mark.parametrize("arch,fast", [(ARCH, True), ("sm_80", False)])
def test_every_word_and_ragged_teams(arch: str, fast: bool) -> None:
    for shape, dtype in ((Shape(72, 8, 16, 4), "bf16"), (Shape(7, 1, 8, 3), "float")):
        source = examples.every_word(shape, dtype) + examples.flags(shape)
        compile_cubin(source, ["words", "flags"], arch, fast=fast)
    compile_cubin(examples.gate_forward(Shape(2561, 1, 1024), "f16"), ["f3"], arch, fast=fast)


@pytest.mark.parametrize("lanes", [4, 8])
def test_the_wide_gate(lanes: int) -> None:
    shape = Shape(160 * lanes, lanes, 160)
    source = examples.gate_forward(shape, "float") + examples.gate_backward(shape, "float")
    cubin = compile_cubin(source, ["f3", "b3", "b3_finish"], ARCH, wide=True)
    assert cubin.image != compile_cubin(source, ["f3", "b3", "b3_finish"], ARCH).image
    with pytest.raises(ValueError, match="exclude each other"):
        compile_cubin(source, ["f3"], ARCH, fast=True, wide=True)


def test_every_wide_word() -> None:
    shape = Shape(7, 1, 8, 3)
    source = examples.every_word(shape, "float") + examples.flags(shape)
    compile_cubin(source, ["words", "flags"], ARCH, wide=True)


def test_long_rows_stay_in_memory() -> None:
    shape = Shape(1 << 20, 8, 512)
    source = examples.gate_forward(shape, "float", "MF_LOOP", "long_")
    assert_no_spills(compile_cubin(source, ["f3"], ARCH))
    shape = Shape(40_000, 8, 256)
    source = examples.gate_backward(shape, "f16", "MF_LOOP", "long_")
    assert_no_spills(compile_cubin(source, ["b3", "b3_finish"], ARCH))


def test_the_words_compile_on_the_host_too() -> None:
    build_host(examples.every_word(Shape(72, 32), "bf16"), ["words"])


def test_a_compile_error_names_the_generated_line() -> None:
    with pytest.raises(BuildError, match=r"generated\(2\): error: identifier \"nonsense\""):
        compile_cubin("// first\nint x = nonsense;\n", [], ARCH)
    with pytest.raises(BuildError, match="no kernel absent"):
        compile_cubin(examples.gate_forward(Shape(64, 8, 8, 4)), ["absent"], ARCH)
