"""Running one direction of a plan: buffers allocated when first written, freed after last use.

What depends on run-time sizes alone (shapes, strides, grids) is worked out once for each set of
sizes and kept; a call then allocates, fills in pointers and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from megafuse import dump
from megafuse.codegen.rows import RowKernel, emit_rows
from megafuse.codegen.schedule import (
    FEWEST_WARPS,
    MANY_ROWS,
    cuda_schedules,
    host_schedule,
    launch,
)
from megafuse.config import Options
from megafuse.device import H200, DeviceSpec, spec_for
from megafuse.fusion.plan import ExternRegion, GraphPlan, MatmulRegion, Operand, RowRegion
from megafuse.ir import Node, Ref, evaluate
from megafuse.runtime.cuda import Cubin, CudaModule, compile_cubin
from megafuse.runtime.host import HostModule, build_host
from megafuse.runtime.matmul import Matmul, accepts, product_of

SHARED_BYTES = 233_472
"""Shared memory that a Hopper multiprocessor has for blocks, 1 KB each for the system included."""

HOST_PARTS = 16
"""Parts a CPU walks its rows in: column sums stay accurate over many rows."""

Progress = Callable[[str, int, int], None]
Values = dict[Node, torch.Tensor]
Step = Callable[[Values], None]


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
    for schedule in cuda_schedules(region, rows):
        kernel = emit_rows(region, plan.buffers, schedule, rounding, f"mf_{region.name}")
        # Where launches cost more than arithmetic, float32 storage gets double arithmetic.
        wide = not kernel.fast and rows < MANY_ROWS
        cubin = compile_cubin(
            kernel.source, kernel.names, arch, fast=kernel.fast, debug=debug, wide=wide
        )
        spills = sum(r.spill_stores + r.spill_loads for r in cubin.resources.values())
        warps = blocks_per_sm(kernel, cubin, H200) * -(-schedule.threads // 32)
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


class Executor:
    """One direction of a plan on one device.

    device: where every tensor lives. Raises BuildError, ToolchainError.
    """

    def __init__(
        self, plan: GraphPlan, device: torch.device, options: Options, progress: Progress | None
    ) -> None:
        self.plan, self.device, self.options = plan, device, options
        self.spec: DeviceSpec = spec_for(device)
        self.built = self._build(progress or (lambda *_: None))
        self._other: dict[str, BuiltRegion] = {}  # for calls on the other side of MANY_ROWS
        self.recipes: dict[tuple[int, ...], tuple[list[tuple[str, Step]], list[Any]]] = {}
        self._last = plan.last_use()

    def _build(self, progress: Progress) -> dict[str, BuiltRegion]:
        work = [r for r in self.plan.regions if isinstance(r, RowRegion)]
        done = 0

        def build(region: RowRegion) -> BuiltRegion:
            nonlocal done
            result = self._build_region(region, self.plan.sizes)
            done += 1
            progress(f"{region.name} compiled", done, len(work))
            return result

        with ThreadPoolExecutor(4) as pool:
            built = {b.region.name: b for b in pool.map(build, work)}
        suffix = "cuda.cu" if self.device.type == "cuda" else "host.cpp"
        dump.write_sources(self.options, self.plan, suffix, [b.kernel for b in built.values()])
        return built

    def _build_region(self, region: RowRegion, sizes: Mapping[str, int]) -> BuiltRegion:
        options, rounding = self.options, self.options.rounding == "eager"
        if self.device.type != "cuda":
            kernel = emit_host(self.plan, region, rounding)
            host = build_host(kernel.source, kernel.names, fast=kernel.fast,
                              sanitize=options.sanitize, debug=options.debug)  # fmt: skip
            return BuiltRegion(region, kernel, host, HOST_PARTS)
        arch, debug = self.spec.arch, options.debug
        kernel, cubin = emit_cuda(self.plan, region, rounding, arch, debug, sizes)
        shared = {kernel.name: kernel.shared}
        cuda = CudaModule(cubin, kernel.names, self.device.index, shared)
        return BuiltRegion(region, kernel, cuda, blocks_per_sm(kernel, cubin, self.spec))

    def kernel(self, region: RowRegion, sizes: Mapping[str, int]) -> BuiltRegion:
        """The kernel for a call of these sizes. Its layout, and so the order of its sums, follows
        from them alone, whatever call the plan was made for."""
        planned = self.plan.rows_of(region) >= MANY_ROWS
        many = self.plan.rows_of(region, sizes) >= MANY_ROWS
        if self.device.type != "cuda" or many == planned:
            return self.built[region.name]
        if region.name not in self._other:
            self._other[region.name] = self._build_region(region, sizes)
        return self._other[region.name]

    # -- running

    def run(self, inputs: list[torch.Tensor], sizes: tuple[int, ...]) -> list[Any]:
        """inputs: the graph's inputs, contiguous, in order; the list is emptied, so that a tensor
        nobody else holds is freed after its last use. sizes: values of the run-time sizes in order
        of name. Returns the graph's outputs (None where it has none)."""
        recipe = self.recipes.get(sizes)
        if recipe is None:
            recipe = self.recipes[sizes] = self._recipe(sizes)
        steps, results = recipe
        values: Values = dict(zip(self.plan.graph.inputs, inputs, strict=True))
        inputs.clear()
        if torch.autograd._profiler_enabled():
            for name, step in steps:
                with torch.profiler.record_function(name):
                    step(values)
        else:
            for _, step in steps:
                step(values)
        return [None if r is None else r(values) for r in results]

    def _recipe(self, sizes: tuple[int, ...]) -> tuple[list[tuple[str, Step]], list[Any]]:
        named = dict(zip(sorted(self.plan.graph.sizes), sizes, strict=True))
        steps: list[tuple[str, Step]] = []
        for i, region in enumerate(self.plan.regions):
            dead = [n for n, last in self._last.items() if last == i]
            if isinstance(region, RowRegion):
                step = self._row_step(self.kernel(region, named), named)
            elif isinstance(region, MatmulRegion):
                step = self._matmul_step(region, named)
            else:
                step = self._extern_step(region, named)
            steps.append((region.name, step))
            if dead:
                steps.append(("free", _free(dead)))
        results = [None if o is None else _view(o, named) for o in self.plan.results]
        return steps, results

    def _row_step(self, built: BuiltRegion, sizes: Mapping[str, int]) -> Step:
        kernel, region, device = built.kernel, built.region, self.device
        shape = launch(region, kernel.kept, kernel.schedule, sizes, self.spec, built.blocks_per_sm)
        new = [(n, [evaluate(d, sizes) for d in n.shape], n.dtype) for n in region.writes()]
        on_host = device.type != "cuda"
        copies = shape.parts * (kernel.schedule.teams if region.kind == "group" else 1)
        lengths = [copies * columns for columns in kernel.partial_columns]
        starts = [4 * sum(lengths[:i]) for i in range(len(lengths))]
        total = sum(lengths)
        fixed = {"parts": shape.parts, "chunks": shape.chunks, "span": shape.span}
        template: list[Any] = []
        for arg in kernel.args:
            if arg.kind == "buffer":
                template.append(arg.node)
            elif arg.kind == "partial":
                template.append(starts[arg.index])
            else:
                template.append(sizes[arg.name] if arg.kind == "size" else fixed[arg.kind])
        partial_at = [i for i, arg in enumerate(kernel.args) if arg.kind == "partial"]
        buffer_at = [i for i, arg in enumerate(kernel.args) if arg.kind == "buffer"]
        module, name, finish = built.module, kernel.name, kernel.finish
        threads = kernel.schedule.threads
        grid = (shape.grid, 1, 1)
        sums = len(kernel.partial_columns)
        tiles = max((-(-c // 32) for c in kernel.partial_columns), default=1)
        finish_grid = (min(tiles * max(1, shape.parts // shape.chunks), 1056), max(sums, 1), 1)
        empty_launch = shape.parts == 0

        def step(values: Values) -> None:
            for node, extents, dtype in new:
                if node in values:  # a concatenation that another region writes a part of
                    continue
                values[node] = torch.empty(extents, dtype=dtype, device=device)
            args = list(template)
            for i in buffer_at:
                args[i] = values[args[i]].data_ptr()
            if total:
                workspace = torch.empty(total, dtype=torch.float32, device=device)
                base = workspace.data_ptr()
                for i in partial_at:
                    args[i] += base
            if empty_launch:
                return
            if on_host:
                module.launch(name, args)  # type: ignore[call-arg,arg-type]
                if finish:
                    module.launch(finish, args)  # type: ignore[call-arg,arg-type]
                return
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            module.launch(name, grid, threads, args, stream)  # type: ignore[call-arg]
            if finish:
                module.launch(finish, finish_grid, (32, 8, 1), args, stream)  # type: ignore[call-arg]

        return step

    def _matmul_step(self, region: MatmulRegion, sizes: Mapping[str, int]) -> Step:
        kernel = self._matmul_kernel(region, sizes)
        a, b = _view(region.a, sizes), _view(region.b, sizes)
        extents = [evaluate(d, sizes) for d in region.node.shape]
        node, dtype, device = region.node, region.node.dtype, self.device
        single = extents[0] == 1
        of_a, of_b = region.a.buffer, region.b.buffer
        of_rows = [o.buffer for kind, o in region.extras if kind == "row"]
        of_tensor = next((o.buffer for kind, o in region.extras if kind == "tensor"), None)
        extras = [_view(o, sizes) for _, o in region.extras]

        def step(values: Values) -> None:
            out = torch.empty(extents, dtype=dtype, device=device)
            if kernel is not None:
                places = values[of_a].data_ptr(), values[of_b].data_ptr(), out.data_ptr()
                rows = [values[n].data_ptr() for n in of_rows]
                tensor = values[of_tensor].data_ptr() if of_tensor is not None else 0
                if kernel.aligned(*places, *rows, tensor):
                    stream = torch._C._cuda_getCurrentRawStream(device.index)
                    kernel.launch(*places, stream, rows, tensor)
                    values[node] = out
                    return
            if extras:
                values[node] = _added(a(values), b(values), [e(values) for e in extras])
                return
            if single:
                torch.mm(a(values)[0], b(values)[0], out=out[0])
            else:
                torch.bmm(a(values), b(values), out=out)
            values[node] = out

        return step

    def _matmul_kernel(self, region: MatmulRegion, sizes: Mapping[str, int]) -> Matmul | None:
        """Our own kernel for this product, or None where torch takes it."""
        if self.device.type != "cuda" or region.node.dtype not in (torch.bfloat16, torch.float16):
            return None
        product = product_of(region, sizes)
        if accepts(product, self.spec.arch) is not None:
            return None
        return Matmul(product, self.device.index, debug=self.options.debug)

    def _extern_step(self, region: ExternRegion, sizes: Mapping[str, int]) -> Step:
        node, items, device = region.node, region.items, self.device
        views = [_view(o, sizes) for o in region.operands]
        attrs = node.attrs
        if attrs["target"] == "constant":
            value = attrs["value"].to(device)

            def constant(values: Values) -> None:
                values[node] = value

            return constant
        namespace, packet, overload = attrs["target"].split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

        def fill(arg: Any, operands: list[torch.Tensor]) -> Any:
            if isinstance(arg, Ref):
                return operands[arg.index]
            if isinstance(arg, list):
                return [fill(a, operands) for a in arg]
            if isinstance(arg, sympy.Basic):
                value = arg.subs({s: sizes[s.name] for s in arg.free_symbols})
                return int(value) if value.is_integer else float(value)
            if isinstance(arg, torch.device):
                return device
            return arg

        def step(values: Values) -> None:
            operands = [v(values) for v in views]
            result = function(
                *[fill(a, operands) for a in attrs["call_args"]],
                **{k: fill(v, operands) for k, v in attrs["call_kwargs"].items()},
            )
            if attrs["multiple"]:
                for item in items:
                    values[item] = result[item.attrs["index"]].contiguous()
            else:
                values[node] = result.contiguous()

        return step


def has_epilogues(device: torch.device, options: Options) -> bool:
    """Whether 16-bit products run on our Hopper kernel, which can add before it stores."""
    if options.rounding == "eager" or options.executor != "auto" or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _added(a: torch.Tensor, b: torch.Tensor, extras: list[torch.Tensor]) -> torch.Tensor:
    """a @ b with tensors added that broadcast to it. The first goes through PyTorch's own call,
    which rounds once for both, as eager's linear layer does."""
    first, *rest = extras
    if first.dtype == a.dtype and len(a) == 1:  # a row as a vector: cuBLAS has a kernel for that
        bias = first[0, 0] if first.shape[1] == 1 else first[0]
        out = torch.addmm(bias, a[0], b[0])[None]
    elif first.dtype == a.dtype:
        out = torch.baddbmm(first, a, b)
    else:
        out, rest = torch.bmm(a, b), extras
    if rest:
        total = out.float()
        for extra in rest:
            total += extra
        out = total.to(a.dtype)
    return out


def _free(dead: list[Node]) -> Step:
    def step(values: Values) -> None:
        for node in dead:
            values.pop(node, None)

    return step


def _view(operand: Operand, sizes: Mapping[str, int]) -> Callable[[Values], torch.Tensor]:
    """Reads `operand` out of the buffers as a strided tensor."""
    node = operand.buffer
    shape = tuple(evaluate(d, sizes) for d in operand.shape)
    strides = tuple(evaluate(d, sizes) for d in operand.strides)
    start = evaluate(operand.offset, sizes)
    if operand.shape == node.shape and start == 0 and _row_major(shape, strides):
        return lambda values: values[node]

    def read(values: Values) -> torch.Tensor:
        base = values[node]
        return base.as_strided(shape, strides, base.storage_offset() + start)

    return read


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
