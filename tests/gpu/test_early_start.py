"""Kernels that start before their predecessor has ended see what it wrote, and nothing older.

Every run gets inputs of its own, so that what the last run left in the same memory is wrong.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "matmul"))

from products import make

import megafuse
from megafuse import Options
from megafuse.codegen.tiles import TILES
from megafuse.runtime import cuda
from megafuse.runtime.matmul import Matmul

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

REPEATS = 30

# `slow` lets its successor start, then takes a millisecond before it writes; `quick` copies what it
# wrote. `hasty` is `quick` without the wait: it shows that the two do run at the same time.
PROBES = """
struct probe {
  using Team = mf::Team<32, 1>;
  static constexpr int min_blocks = 1;
  struct Args { float* in; float* out; i64 value; i64 parts; };
};
struct slow : probe {
  MF_FN static void run(const Team& team, const Args& a) {
    __nanosleep(900000);
    team.store(a.in, float(a.value));
  }
};
struct quick : probe {
  MF_FN static void run(const Team& team, const Args& a) { team.store(a.out, mf::load(*a.in)); }
};
MF_KERNEL(slow)
MF_KERNEL(quick)
extern "C" __global__ void hasty(const __grid_constant__ probe::Args a) {
  quick::run(probe::Team(), a);
}
"""
NAMES = ["slow", "quick", "hasty"]


def probed(second: str, serial: bool) -> list[bool]:
    """Whether `second` saw what `slow` wrote just before, run after run."""
    device = torch.cuda.current_device()
    cubin = cuda.compile_cubin(PROBES, NAMES, cuda.device_arch(device))
    module = cuda.CudaModule(cubin, NAMES, device, serial=serial)
    place, out = torch.zeros(1, device="cuda"), torch.zeros(REPEATS, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for i in range(REPEATS):
        args = [place.data_ptr(), out.data_ptr() + 4 * i, i + 1, 1]
        module.launch("slow", (1, 1, 1), 32, args, stream)
        module.launch(second, (1, 1, 1), 32, args, stream)
        torch.cuda.synchronize()
    return [x == i + 1 for i, x in enumerate(out.tolist())]


def test_a_kernel_waits_for_what_it_reads() -> None:
    assert all(probed("quick", serial=False))
    assert not all(probed("hasty", serial=False)), "no kernel started early"
    assert all(probed("hasty", serial=True)), "a serial launch started early"


class Chain(nn.Module):
    """Long kernels before short ones and the other way round, column sums, and a product."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(columns), nn.Linear(columns, columns)
        self.scale = nn.Parameter(torch.rand(columns) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        means = torch.tanh(h.float().mean(0)).to(x.dtype)
        gate = torch.sigmoid(means * self.scale)
        y = self.linear(h * gate)
        return torch.relu(y - y.float().mean(0).to(x.dtype)) * gate


def stepper(
    module: nn.Module, x: Tensor, serial: bool, fuel: int | None
) -> Callable[[], list[Any]]:
    """Runs forward and backward of the fused module on what is in x; fresh results every time."""
    fused = megafuse.fuse(module, options=Options(serial=serial, fuel=fuel))
    leaves = [x, *module.parameters()]

    def run() -> list[Any]:
        out = fused(x)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    return run


@pytest.mark.parametrize("fuel", [None, 0], ids=["fused", "unfused"])
@pytest.mark.parametrize("rows", [48, 2048, 100_000])
def test_the_same_bits_as_one_after_the_other(rows: int, fuel: int | None) -> None:
    torch.manual_seed(0)
    module = Chain(256).to("cuda", torch.bfloat16)
    x = torch.empty(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    early, late = (stepper(module, x, serial, fuel) for serial in (False, True))
    for i in range(REPEATS):
        with torch.no_grad():
            x.normal_(mean=i % 7)
        for got, expected in zip(early(), late(), strict=True):
            assert torch.equal(got, expected), f"run {i}"


@pytest.mark.parametrize("rows", [48, 2048])
def test_the_same_bits_from_a_graph(rows: int) -> None:
    torch.manual_seed(0)
    module = Chain(256).to("cuda", torch.bfloat16)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    early, late = (stepper(module, x, serial, None) for serial in (False, True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            early()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = early()
    for i in range(REPEATS):
        with torch.no_grad():
            x.normal_(mean=i % 7)
        graph.replay()
        for got, expected in zip(captured, late(), strict=True):
            assert torch.equal(got, expected), f"replay {i}"


@pytest.mark.skipif(HOPPER and torch.cuda.get_device_capability() != (9, 0), reason="no wgmma")
@pytest.mark.parametrize("splits", [1, 4])
def test_products_with_random_delays(splits: int) -> None:
    """Each product reads what the one before wrote, and overwrites what that one read."""
    size = 1024
    case = make(1, size, size, size, device="cuda")
    weights = torch.randn(size, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    stream = torch.cuda.current_stream().cuda_stream

    def chain(start: Tensor, serial: bool) -> Tensor:
        matmul = Matmul(case.product, 0, tile=TILES[-1], splits=splits, jitter=True, serial=serial)
        here, there = start.clone(), torch.full_like(start, float("nan"))
        sums = torch.full((matmul.sums,), float("nan"), device="cuda")
        for _ in range(8):
            matmul.launch(here.data_ptr(), weights.data_ptr(), there.data_ptr(), stream,
                          workspace=sums.data_ptr())  # fmt: skip
            here, there = there, here
        return here

    for i in range(REPEATS):
        start = torch.randn(size, size, device="cuda", dtype=torch.bfloat16) + i
        assert torch.equal(chain(start, False), chain(start, True)), f"run {i}"


def test_the_attribute_is_on_every_launch_or_on_none() -> None:
    for serial in (False, True):
        module = Chain(256).to("cuda", torch.bfloat16)
        x = torch.randn(48, 256, device="cuda", dtype=torch.bfloat16)
        compiled = megafuse.fuse(module, options=Options(serial=serial)).build(x)
        assert compiled is not None
        for built in compiled.forward.built.values():
            for name in built.kernel.names:
                how = built.module.entry(name, (1, 1, 1), 32)[1]
                assert struct.unpack("=7I4x2QI4x", how)[-1] == int(not serial)
