"""The generated kernel itself, run on a CPU: one fiber a thread, the copy engine and wgmma played.

Layouts, descriptors, coordinates, the order of hand-overs and the mapping of the epilogue are those
of the device source; only the PTX wrappers are replaced.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import torch

from megafuse.codegen.matmul import FINISH_THREADS, THREADS, MatmulKernel, emit_matmul
from megafuse.codegen.tiles import TileConfig
from megafuse.runtime import source
from megafuse.runtime.host import build_host
from megafuse.runtime.matmul import cut_of, integers, parameters, places, spec_of
from megafuse.runtime.product import Layouts, Product, layouts_of, row_stride
from megafuse.runtime.split import finish_blocks, finish_numbers, sums

HERE = Path(__file__).resolve().parent
TILE = Path(source.__file__).parent.parent / "codegen" / "tile"
_MMA = re.compile(
    r"    asm volatile\(.*?m64n(\d+)k16\.f32\.(bf16|f16).*?1, 1, (\d), (\d);.*?\);\n", re.S
)


def host_source(kernel: MatmulKernel) -> str:
    """`kernel` with its PTX replaced, and an entry that runs it block after block."""
    text = source.header("cuda.cuh", (HERE.parent / "tile" / "emulated.h").read_text())
    code = kernel.source.replace(
        (TILE / "sm90" / "ptx.cuh").read_text(), (HERE / "emulated_sm90.h").read_text()
    )
    code, found = _MMA.subn(
        r"    mf::sm90::ptx::mma<\1, \3, \4, \2>(d, a, b, mf::sm90::DESCRIPTOR_HIGH, keep);\n", code
    )
    assert found == 1
    code = code.replace(
        "extern __shared__ __align__(1024) unsigned char dynamic[];",
        "unsigned char* dynamic = emulated::shared_memory;",
    )
    parameter = "TailArgs" if kernel.spec.tail else "Args"
    entry = f"""
extern "C" void emulate(const i64* a) {{
  emulated::random_state = unsigned(a[1]);
  mf::sm90::{parameter} args;
  std::memcpy((void*)&args, (const void*)(a + 2), sizeof args);
  emulated::launch(a[0], 1, {THREADS}, 1, [&] {{ {kernel.name}(args); }});
}}
"""
    if kernel.finish:
        entry += f"""
extern "C" void emulate_finish(const i64* a) {{
  mf::sm90::FinishArgs args;
  std::memcpy((void*)&args, (const void*)(a + 1), sizeof args);
  emulated::launch(a[0], 1, {FINISH_THREADS}, 1, [&] {{ {kernel.finish}(args); }});
}}
"""
    return "#define MF_FAST 1\n" + text + code + entry


def run_tail(
    product: Product, operands: list[torch.Tensor], ins: list[torch.Tensor],
    outs: list[torch.Tensor], rows: list[torch.Tensor], sums: torch.Tensor, tile: TileConfig,
    blocks: int, seed: int,
) -> None:  # fmt: skip
    """The same for a product with a tail. operands: a and b; sums: places of partial sums."""
    cut = cut_of(product, blocks, tile)
    kernel = emit_matmul(spec_of(product, cut))
    module = build_host(host_source(kernel), ["emulate"])
    layouts = layouts_of(product)
    assert isinstance(layouts, Layouts)
    args = bytearray(parameters(product, cut, layouts, kernel.spec))
    data = [*operands, *outs, *ins, *rows, *sums]
    heights = [tile.m if layouts.a_major == "k" else 64, tile.n if layouts.b_major == "k" else 64]
    heights += [64] * (len(outs) + len(ins))
    maps = [layouts.a, layouts.b, *layouts.outs, *layouts.ins]
    for i, (place, tensor) in enumerate(
        zip(places(product, layouts, kernel.spec), data, strict=True)
    ):
        assert place is not None
        struct.pack_into("=q", args, place.at, tensor.data_ptr())
        if place.encoder is not None:
            layout = maps[i]
            described = [*layout.extents, *layout.strides, 64 if i < 2 else 32, heights[i]]
            struct.pack_into("=7q", args, place.at + 8, *described)
    words = struct.unpack(f"={len(args) // 8}q", args)
    module.launch("emulate", [blocks, seed, *words])


def run(
    product: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rows: list[torch.Tensor],
    tensor: torch.Tensor | None,
    tile: TileConfig,
    blocks: int,
    seed: int = 1,
    splits: int = 1,
) -> None:
    """Computes `product` into c, as `blocks` blocks would."""
    cut = cut_of(product, blocks, tile, splits)
    kernel = emit_matmul(spec_of(product, cut))
    entries = ["emulate", *(["emulate_finish"] if kernel.finish else [])]
    module = build_host(host_source(kernel), entries)
    layouts = layouts_of(product)
    assert isinstance(layouts, Layouts)
    words: list[int] = []
    boxes = (tile.m if layouts.a_major == "k" else 64, tile.n if layouts.b_major == "k" else 64)
    for layout, data, height in (
        (layouts.a, a, boxes[0]), (layouts.b, b, boxes[1]), (layouts.c, c, 64),
        (layouts.tensor, tensor, 64),
    ):  # fmt: skip
        if layout is None or data is None:
            words += [0] * 16
            continue
        described = [data.data_ptr(), *layout.extents, *layout.strides, 64, height]
        words += described + [0] * (16 - len(described))
    numbers = struct.unpack("=5q", struct.pack("=10i", *integers(product, cut, layouts)))
    if kernel.finish is None:
        pad = [0] * (2 - len(rows))
        words += [r.data_ptr() for r in rows] + pad + [row_stride(r) for r in product.rows] + pad
        module.launch("emulate", [blocks, seed, *words, *numbers])
        return
    # As the runtime does: the first kernel knows the operands and the workspace, no more.
    workspace = torch.full((sums(product, cut.splits) + 8,), float("nan"))
    words[32:] = [0] * 32 + [workspace.data_ptr(), 0, 0, 0]
    module.launch("emulate", [blocks, seed, *words, *numbers])
    assert workspace[-8:].isnan().all() and not workspace[:-8].isnan().any()
    args = finish_numbers(product, cut.splits)
    pointers = [workspace, c, tensor, *rows]
    for i, data in enumerate(pointers):
        args[i] += 0 if data is None else data.data_ptr()
    module.launch("emulate_finish", [finish_blocks(product), *args])
