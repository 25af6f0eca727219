"""Products with tails on the device: tensors beside the product, several results, column sums."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "matmul"))

from tails import TAILS, TailCase, make_tail

import megafuse
from megafuse.codegen.tiles import TILES, TileConfig
from megafuse.fusion.plan import MatmulRegion
from megafuse.runtime.matmul import Matmul

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU: wgmma exists nowhere else")

LARGE, MIDDLE, FLAT, SMALL = TILES
SHORT, LONG = (100, 136, 264, 72), (7, 1000, 1288, 1288)
CASES: list[tuple[TileConfig, str, tuple[int, int, int, int], dict[str, Any]]] = [
    *[(tile, tail, (1, tile.m, tile.n, 640), {}) for tile in TILES for tail in TAILS],
    *[(tile, "gate", SHORT, {"majors": "mk", "epilogue": "bias"}) for tile in TILES],
    *[(LARGE, tail, LONG, {"majors": "kk", "batch_inside": True}) for tail in TAILS],
    (LARGE, "all", (3, 1, 72, 1288), {"dtype": torch.float16}),
    (MIDDLE, "all", LONG, {"majors": "mn", "shared_b": True}),
    (SMALL, "gate", (3, 72, 8, 13), {"majors": "mn"}),
]


def launch(case: TailCase, tile: TileConfig, **build: Any) -> None:
    matmul = Matmul(case.product, 0, tile=tile, **build)
    operands = [case.base.a, case.base.b, *case.outs, *case.ins, *case.base.rows]
    pointers = [x.data_ptr() for x in operands]
    # All partial sums lie in one workspace, which is what each of them is given.
    pointers += [case.sums.data_ptr()] * len(case.sums)
    matmul.launch_at(tuple(pointers), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tile,tail,size,how", CASES, ids=str)
def test_tails(tile: TileConfig, tail: str, size: tuple[int, int, int, int], how: Any) -> None:
    case = make_tail(tail, size, device="cuda", **how)
    launch(case, tile, debug=True)
    assert case.mismatch() is None, case.mismatch()


@pytest.mark.parametrize("tile,tail", [(LARGE, "gate"), (LARGE, "all"), (MIDDLE, "all")], ids=str)
def test_the_same_bits_under_random_delays(tile: TileConfig, tail: str) -> None:
    for size in (LONG, SHORT):
        case = make_tail(tail, size, device="cuda")
        results = []
        for build in ({}, {}, {"jitter": True}, {"jitter": True}):
            case.clear()
            launch(case, tile, **build)
            results.append([*(o.clone() for o in case.outs), case.sums.clone()])
        assert case.mismatch() is None, case.mismatch()
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Gated(torch.nn.Module):
    """Two products and a gate, biases and a mask: tails with one and two operands, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(1024, 512)
        self.up = torch.nn.Linear(1024, 512)
        self.down = torch.nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * scale


def runs(fused: Any, x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    for p in fused.parameters():
        p.grad = None
    out = fused(x, scale)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in fused.parameters())]  # type: ignore[list-item]


def test_the_same_bits_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is what the product and a row kernel behind it would store; column sums are
    added up in another order. Addresses that the copy engine cannot take change nothing either."""
    torch.manual_seed(0)
    module = Gated().to("cuda", torch.bfloat16)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    room = torch.randn(4096 * 1024 + 1, device="cuda", dtype=torch.bfloat16)
    scale = room[1:].view(4096, 1024)
    fused = megafuse.fuse(module, x.requires_grad_(), scale)
    (plan,) = [c.plan for same in fused._plans.values() for c in same]
    tails = [r for g in (plan.forward, plan.backward) for r in g.regions
             if isinstance(r, MatmulRegion) and r.tail]  # fmt: skip
    assert len(tails) >= 2
    assert any(r.tail.sums for r in tails if r.tail)
    together = runs(fused, x, scale)
    assert all(torch.equal(a, b) for a, b in zip(together, runs(fused, x, scale), strict=True))
    clean = scale.clone()
    assert torch.equal(together[0], runs(fused, x, clean)[0])

    from megafuse.fusion import planner

    monkeypatch.setattr(planner, "absorb", lambda regions, *_: (list(regions), [], []))
    apart = runs(megafuse.fuse(module, x, scale), x, scale)
    for name, a, b in zip(["out", "x", *(n for n, _ in module.named_parameters())],
                          together, apart, strict=True):  # fmt: skip
        if "bias" in name:
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-2), name
        else:
            assert torch.equal(a, b), name
