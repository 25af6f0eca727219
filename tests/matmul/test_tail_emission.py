"""Tails as code: what the assembler makes of them, and what the kernel has no room for."""

from __future__ import annotations

import pytest
import torch
from tails import TAILS

from megafuse.codegen.matmul import MatmulSpec, Step, Tail, emit_matmul
from megafuse.codegen.tiles import TILES, TileConfig
from megafuse.errors import UnsupportedError
from megafuse.runtime.matmul import compile_matmul

# As `emit_tail` spells them: a GELU, and a SwiGLU's gradient with two bias sums.
GELU = Tail(("y[0] = x;", "y[1] = x * 0.5f * (1.f + mf::erf(x * 0.70710678f));"), 0, 2, 0)
SWIGLU = Tail(
    (
        "const auto v1 = mf::sigmoid(t[0]);",
        "y[0] = x * (t[0] * v1);",
        "y[1] = x * t[1] * (v1 * (1.f + t[0] * (1.f - v1)));",
        "s[0] = y[0];",
        "s[1] = y[1];",
    ),
    2, 2, 2,
)  # fmt: skip


@pytest.mark.parametrize("tail", [TAILS["relu"], GELU, SWIGLU], ids=["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("tile", TILES[:2], ids=str)
def test_no_register_spills(tile: TileConfig, tail: Tail) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    spec = MatmulSpec(
        torch.bfloat16, "k", "k", (Step("add", "row"),), torch.bfloat16, tile, tail=tail
    )
    kernel = emit_matmul(spec)
    cubin = compile_matmul(kernel)
    used = cubin.resources[kernel.name]
    assert used.spill_stores == used.spill_loads == 0, cubin.log
    assert used.registers == 168, "setmaxnreg rests on 384 threads starting with 168 registers"
    assert "wgmma" not in cubin.log and "setmaxnreg" not in cubin.log, cubin.log
    assert kernel.shared_bytes <= 227 * 1024


def test_two_places_beside_four_stages() -> None:
    for depth, sums in ((1, 0), (2, 0), (1, 1)):
        staging = TILES[0].staging(depth, sums)
        assert staging.places == 2 and TILES[0].stages(0, staging) == 4


def test_what_a_tail_cannot_be() -> None:
    plain = MatmulSpec(torch.bfloat16, "k", "k", (), torch.bfloat16, TILES[0])
    for tail in (Tail(("",), 4, 1, 0), Tail(("",), 0, 0, 1), Tail(("",), 0, 1, 5)):
        with pytest.raises(UnsupportedError, match="takes in at most 3 tensors"):
            emit_matmul(MatmulSpec(**{**vars(plain), "tail": tail}))
    with pytest.raises(UnsupportedError, match="in one pass"):
        emit_matmul(MatmulSpec(**{**vars(plain), "split": True, "tail": TAILS["relu"]}))
