"""Row regions compiled for a device, and their launches at run-time sizes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megafuse.codegen import schedule
from megafuse.codegen.candidates import FEWEST_WARPS, MANY_ROWS, cuda_schedules
from megafuse.codegen.rows import RowKernel, emit_rows
from megafuse.codegen.schedule import by_block, host_schedule, launch
from megafuse.device import H200, DeviceSpec
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.ir import Node, evaluate
from megafuse.runtime.cuda import Cubin, CudaModule, compile_cubin
from megafuse.runtime.host import HostModule
from megafuse.runtime.launch import Grid
from megafuse.runtime.native import Launch, Patch

SHARED_BYTES = 233_472
"""Shared memory that a Hopper multiprocessor has for blocks, 1 KB each for the system included."""

HOST_PARTS = 16
"""Parts a CPU walks its rows in: column sums stay accurate over many rows."""

Values = dict[Node, torch.Tensor]
Step = Callable[[Values], None]
Allocator = Callable[[torch.device], torch.Tensor]


@dataclass
class BuiltRegion:
    """A row region's kernel, compiled and loaded."""

    region: RowRegion
    kernel: RowKernel
    module: HostModule | CudaModule
    blocks_per_sm: int


def emit_host(plan: GraphPlan, region: RowRegion, rounding: bool) -> RowKernel:
    return emit_rows(region, plan.buffers, host_schedule(region), rounding, f"mf_{region.name}")


def emit_cuda(
    plan: GraphPlan,
    region: RowRegion,
    rounding: bool,
    arch: str,
    debug: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> tuple[RowKernel, Cubin]:
    """The preferred layout whose kernels the assembler fits without spilling and that keeps a
    multiprocessor busy (else the one that spills least), compiled for `arch`. Needs no GPU.

    sizes: of the call (default: those the plan was made for); all that counts is on which side of
    `MANY_ROWS` the region's rows are."""
    best: tuple[int, RowKernel, Cubin] | None = None
    rows = plan.rows_of(region, sizes)
    for layout in cuda_schedules(region, rows):
        kernel = emit_rows(region, plan.buffers, layout, rounding, f"mf_{region.name}")
        # Where launches cost more than arithmetic, float32 storage gets double arithmetic.
        wide = not kernel.fast and rows < MANY_ROWS
        cubin = compile_cubin(
            kernel.source, kernel.names, arch, fast=kernel.fast, debug=debug, wide=wide
        )
        spills = sum(r.spill_stores + r.spill_loads for r in cubin.resources.values())
        warps = blocks_per_sm(kernel, cubin, H200) * -(-layout.threads // 32)
        if warps < FEWEST_WARPS and rows >= MANY_ROWS:
            spills += 1 << 20  # so that any layout with more warps is better
        if best is None or spills < best[0]:
            best = (spills, kernel, cubin)
        if spills == 0:
            break
    assert best is not None
    return best[1], best[2]


def blocks_per_sm(kernel: RowKernel, cubin: Cubin, spec: DeviceSpec) -> int:
    """How many blocks of `kernel` a multiprocessor holds at once."""
    used = cubin.resources[kernel.name]
    warps = -(-kernel.schedule.threads // 32)
    registers = -(-used.registers // 8) * 8 * 32 * warps
    by_shared = SHARED_BYTES // (kernel.shared + used.shared_bytes + 1024)
    return max(1, min(spec.registers // registers, by_shared, spec.threads // (warps * 32), 32))


class RowCall:
    """A row region at run-time sizes: its launches, but for addresses.

    workspace: bytes for the partial column sums. parts, chunks: of partial sums that another
    kernel writes; then the second step is all there is to launch."""

    def __init__(
        self, built: BuiltRegion, sizes: Mapping[str, int], spec: DeviceSpec, parts: int = 0,
        chunks: int = 1,
    ) -> None:  # fmt: skip
        kernel, region = built.kernel, built.region
        shape = schedule.Launch(parts, chunks, 0, 0)
        if not parts:
            shape = launch(region, kernel.kept, kernel.schedule, sizes, spec, built.blocks_per_sm)
        self.module = built.module
        self.new = [(n, allocator(n, sizes)) for n in region.writes() if n not in kernel.inside]
        copies = shape.parts * (kernel.schedule.teams if by_block(region, kernel.schedule) else 1)
        lengths = [copies * columns for columns in kernel.partial_columns]
        self.workspace = 4 * sum(lengths)
        fixed = {"parts": shape.parts, "chunks": shape.chunks, "span": shape.span}
        self.args: list[int] = []
        """The kernels' parameters, without addresses: of partial sums, bytes into the workspace."""
        self.buffers: list[tuple[int, Node]] = []
        self.partials: list[int] = []
        sums = {root.target for root in region.roots if root.kind == "column"}
        for i, arg in enumerate(kernel.args):
            if arg.kind == "buffer":
                assert arg.node is not None
                if not parts or arg.node in sums:  # the second step knows no others
                    self.buffers.append((i, arg.node))
                self.args.append(0)
            elif arg.kind == "partial":
                self.partials.append(i)
                self.args.append(4 * sum(lengths[: arg.index]))
            else:
                self.args.append(sizes[arg.name] if arg.kind == "size" else fixed[arg.kind])
        self.kernels: list[tuple[str, Grid, int | Grid]] = []
        if shape.parts:
            if not parts:
                self.kernels.append((kernel.name, (shape.grid, 1, 1), kernel.schedule.threads))
            if kernel.finish:
                tiles = max((-(-c // 32) for c in kernel.partial_columns), default=1)
                blocks = min(tiles * max(1, shape.parts // shape.chunks), 1056)
                grid = (blocks, max(len(kernel.partial_columns), 1), 1)
                self.kernels.append((kernel.finish, grid, (32, 8, 1)))

    def step(self, device: torch.device) -> Step:
        """Allocates what the region writes, then launches it."""
        new, template, buffers, partials = self.new, self.args, self.buffers, self.partials
        module, kernels, workspace = self.module, self.kernels, self.workspace

        def step(values: Values) -> None:
            for node, allocate in new:
                if node not in values:  # else a concatenation that another region writes a part of
                    values[node] = allocate(device)
            args = list(template)
            for i, node in buffers:
                args[i] = values[node].data_ptr()
            if workspace:
                room = torch.empty(workspace, dtype=torch.uint8, device=device)
                base = room.data_ptr()
                for i in partials:
                    args[i] += base
            if isinstance(module, CudaModule):
                stream = current_stream(device)
                for name, grid, block in kernels:
                    module.launch(name, grid, block, args, stream)
            else:
                for name, _, _ in kernels:
                    module.launch(name, args)

        return step

    def launch(self, values: Values, workspace: int, stream: int) -> None:
        """Launches on a CUDA stream what `step` would, with everything allocated."""
        assert isinstance(self.module, CudaModule)
        args = list(self.args)
        for i, node in self.buffers:
            args[i] = values[node].data_ptr()
        for i in self.partials:
            args[i] += workspace
        for name, grid, block in self.kernels:
            self.module.launch(name, grid, block, args, stream)

    def launches(self) -> list[Launch]:
        """The same for `native.Queue`; the workspace is a buffer, this object."""
        patches = [Patch(8 * i, node) for i, node in self.buffers]
        patches += [Patch(8 * i, self, self.args[i]) for i in self.partials]
        args = struct.pack(f"={len(self.args)}q", *self.args)
        result = []
        for name, grid, block in self.kernels:
            if 0 not in grid:
                what = f"{name} {grid} x {block}"
                entry = self.module.entry(name, grid, block)
                result.append(Launch(what, *entry, args, tuple(patches)))
        return result


def allocator(node: Node, sizes: Mapping[str, int]) -> Allocator:
    """Makes room for `node`: a tensor of its shape, with its pitch."""
    extents, dtype = [evaluate(d, sizes) for d in node.room], node.dtype
    if node.room == node.shape:
        return lambda device: torch.empty(extents, dtype=dtype, device=device)
    width = evaluate(node.shape[-1], sizes)
    return lambda device: torch.empty(extents, dtype=dtype, device=device)[..., :width]


def current_stream(device: torch.device) -> int:
    """The handle of the stream that this thread launches on."""
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream
