"""Every kernel of the headline compiles for Hopper without spilling, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch
from products import BIAS, BOTH, GATED, RESIDUAL

from megafuse.codegen.matmul import MatmulSpec, Step, emit_matmul, refused_epilogue
from megafuse.codegen.tiles import TILES, TileConfig, ranked
from megafuse.errors import UnsupportedError
from megafuse.runtime.matmul import compile_matmul

LARGE, MIDDLE, FLAT, SMALL = TILES
BF16, F16 = torch.bfloat16, torch.float16


def spec(tile: TileConfig = LARGE, epilogue: tuple[Step, ...] = (), majors: str = "kn",
         dtype: torch.dtype = BF16, **more: object) -> MatmulSpec:  # fmt: skip
    a, b = ("k" if majors[0] == "k" else "mn"), ("mn" if majors[1] == "n" else "k")
    return MatmulSpec(dtype, a, b, epilogue, dtype, tile, dtype, dtype, **more)  # type: ignore


@pytest.mark.parametrize(
    "case",
    [
        spec(majors="kn"),
        spec(majors="kk"),
        spec(majors="mn"),
        spec(majors="mk", dtype=F16),
        spec(epilogue=BIAS),
        spec(epilogue=RESIDUAL),
        spec(epilogue=BOTH),
        spec(epilogue=GATED),
        spec(epilogue=BOTH, dtype=F16),
        spec(epilogue=BOTH, jitter=True),
        *[spec(tile, BOTH) for tile in TILES[1:]],
    ],
    ids=lambda s: f"{s.a_major}{s.b_major}-{s.tile}-{len(s.epilogue)}{'-jitter' * s.jitter}",
)
def test_compiles_without_spills(case: MatmulSpec) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    kernel = emit_matmul(case)
    cubin = compile_matmul(kernel)
    used = cubin.resources[kernel.name]
    assert used.spill_stores == used.spill_loads == 0, cubin.log
    assert used.registers == 168, "setmaxnreg rests on 384 threads starting with 168 registers"
    assert "wgmma" not in cubin.log, cubin.log  # "... instructions are serialized due to ..."
    assert "setmaxnreg" not in cubin.log, cubin.log  # "... ignored ..."


@pytest.mark.parametrize(
    "case",
    [
        *[spec(tile, BOTH, "mn", split=True) for tile in TILES],
        spec(majors="mn", split=True),
        spec(MIDDLE, GATED, "mk", dtype=F16, split=True),
        spec(majors="mn", split=True, jitter=True),
    ],
    ids=lambda s: f"{s.a_major}{s.b_major}-{s.tile}-{len(s.epilogue)}{'-jitter' * s.jitter}",
)
def test_a_split_product_is_two_kernels(case: MatmulSpec) -> None:
    kernel = emit_matmul(case)
    assert kernel.names == [kernel.name, f"{kernel.name}_finish"]
    assert kernel.stages == case.tile.stages(0), "no row operand takes room"
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    cubin = compile_matmul(kernel)
    first, second = (cubin.resources[name] for name in kernel.names)
    assert first.registers == 168 and first.spill_stores == first.spill_loads == 0, cubin.log
    assert second.spill_stores == second.spill_loads == 0, cubin.log
    assert second.registers > 64, "or the 16 loads of a thread are not on their way at once"
    assert "wgmma" not in cubin.log and "setmaxnreg" not in cubin.log, cubin.log


def test_the_debug_build_fits_too() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    for split in (False, True):
        kernel = emit_matmul(spec(epilogue=BOTH, split=split))
        for used in compile_matmul(kernel, debug=True).resources.values():
            assert used.spill_stores == used.spill_loads == 0, "it would test another kernel"


def test_stages_fill_the_shared_memory() -> None:
    assert [tile.stages(0) for tile in TILES] == [4, 6, 4, 8]
    for tile in TILES:
        for row_bytes in (0, 2, 4, 8):
            assert tile.shared_bytes(row_bytes) <= 227 * 1024
            assert tile.stages(row_bytes) >= 3
    assert LARGE.stages(2) == 4, "a bias must not cost a stage"


def test_the_epilogue_reads_as_it_was_asked() -> None:
    steps = (*GATED, Step("round"))
    source = emit_matmul(spec(epilogue=steps)).source
    for line in ("x1 = (x0 * row[0]);", "x2 = (x1 + row[1]);", "x5 = (x4 * tensor);",
                 "x6 = mf::to_bf16(x5);"):  # fmt: skip
        assert line in source
    assert "static constexpr int rows = 2;" in source


def test_equal_specs_give_equal_source_and_others_other_names() -> None:
    assert emit_matmul(spec()) == emit_matmul(spec())
    specs = [spec(), spec(MIDDLE), spec(epilogue=BIAS), spec(dtype=F16), spec(majors="kk")]
    assert len({emit_matmul(s).name for s in specs}) == len(specs)


def test_epilogues_it_cannot_have() -> None:
    assert refused_epilogue(BOTH) is None
    for steps, words in (
        ((Step("sum"),), "no pointwise operator"),
        ((Step("add"),), "takes 2 arguments"),
        ((Step("neg", 1.0),), "takes 1 arguments"),
        (RESIDUAL * 2, "one tensor operand"),
        (BIAS * 3, "at most 2"),
    ):
        assert words in (refused_epilogue(steps) or "")
        with pytest.raises(UnsupportedError, match=words):
            emit_matmul(spec(epilogue=steps))
    with pytest.raises(UnsupportedError, match="16-bit"):
        emit_matmul(spec(dtype=torch.float32))


@pytest.mark.parametrize(
    "size,tile",
    [
        ((64, 1024, 5120, 1280), LARGE),
        ((64, 1024, 1280, 2560), LARGE),
        ((64, 1280, 5120, 1024), LARGE),
        ((64, 64, 5120, 1280), FLAT),  # half of a 128-row tile would be empty
        ((1, 64, 5120, 1280), SMALL),  # 40 blocks of 128 columns instead of 20
        ((16, 256, 512, 512), MIDDLE),  # 128 tiles on 132 multiprocessors instead of 64
        ((1, 1, 128, 64), SMALL),
    ],
    ids=str,
)
def test_ranking(size: tuple[int, int, int, int], tile: TileConfig) -> None:
    best = ranked(*size, 132)[0]
    assert (best.tile, best.splits) == (tile, 1)
