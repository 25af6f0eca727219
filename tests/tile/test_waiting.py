"""A kernel may start before its predecessor has ended, and touches no memory before its wait.

The emulated device stops on such an access, in every test that runs a kernel on it. Here is that it
does, and what it cannot see: which loads the compiler may move.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
import signal

import pytest
import tile_examples as examples
from test_device_words import TILE, emulate
from tile_checks import check_gate
from tile_examples import Shape

from megafuse.codegen.matmul import MatmulSpec, emit_matmul
from megafuse.codegen.tiles import TILES
from megafuse.runtime import source

HEADERS = sorted(TILE.rglob("*.cuh"))


def _run_the_gate(forgotten: str) -> None:
    faulthandler.disable()  # the end of this process is expected
    header = source.header.__wrapped__  # type: ignore[attr-defined]
    source.header = lambda *args: header(*args).replace(forgotten, "")  # type: ignore[assignment]
    shape = Shape(72, 8, 16, 2)
    launch = emulate(examples.gate_forward(shape), shape, ["f3"], fast=True)
    check_gate(launch, shape.columns, "bf16")


def test_the_emulated_device_notices_a_missing_wait() -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_run_the_gate, args=("mf::begin();",)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGABRT


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.name)
def test_no_load_may_move_up_in_front_of_the_wait(path: object) -> None:
    text = re.sub(r"//.*", "", path.read_text())  # type: ignore[attr-defined]
    assert not re.search(r"__ldg|__restrict__|ld\.global\S*\.nc|\.nc\b", text)
    for access in re.finditer(r"(?:ld|st|cp\.\S+)\.global|cp\.async", text):
        assert "asm volatile(" in text[text.rindex("asm", 0, access.start()) :][:13]


def test_the_waits_order_memory() -> None:
    text = (TILE / "ptx.cuh").read_text()
    for word in ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;"):
        assert text.count(f'asm volatile("{word}" ::: "memory");') == 1


def test_every_kernel_waits_first() -> None:
    text = (TILE / "cuda.cuh").read_text()
    kernels = re.findall(r"__global__ .*?\{\s*\\\n(.*?)\n  \}\n", text, re.S)
    assert len(kernels) == 3
    assert all(body.strip().startswith("mf::begin();") for body in kernels)
    entries = {"gemm.cuh": "MF_FN void gemm(", "finish.cuh": "MF_FN void finish_product("}
    for name, entry in entries.items():
        body = (TILE / "sm90" / name).read_text().split(entry)[1]
        first = re.search(
            r"begin\(\)|wait_for_predecessor\(\)|load_\w+<|consume<|Kept|a\.\w+", body
        )
        assert first is not None and first[0] in ("begin()", "wait_for_predecessor()"), first


@pytest.mark.parametrize("split", [False, True])
def test_a_product_enters_through_them(split: bool) -> None:
    import torch

    spec = MatmulSpec(torch.bfloat16, "k", "mn", (), torch.bfloat16, TILES[0], split=split)
    kernel = emit_matmul(spec)
    bodies = re.findall(r"__global__ [^{]*\{\n  (\S+?)<", kernel.source)
    assert bodies == ["mf::sm90::gemm", *(["mf::sm90::finish_product"] if split else [])]
