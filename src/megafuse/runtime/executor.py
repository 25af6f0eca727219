"""Running one direction of a plan: buffers allocated when first written, freed after last use.

What depends on run-time sizes alone (shapes, strides, grids) is worked out once for each set of
sizes and kept; a call then allocates, fills in pointers and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from megafuse import dump
from megafuse.codegen.candidates import MANY_ROWS
from megafuse.config import Options
from megafuse.device import DeviceSpec, spec_for
from megafuse.fusion.plan import ExternRegion, GraphPlan, MatmulRegion, Operand, Region, RowRegion
from megafuse.index import strides
from megafuse.ir import Node, Ref, evaluate
from megafuse.runtime import native
from megafuse.runtime.arena import Piece, Program, Reader, Work, as_tensor, program_of
from megafuse.runtime.built import (
    HOST_PARTS,
    Allocator,
    BuiltRegion,
    RowCall,
    Step,
    Values,
    allocator,
    blocks_per_sm,
    current_stream,
    emit_cuda,
    emit_host,
)
from megafuse.runtime.cuda import CudaModule
from megafuse.runtime.host import build_host
from megafuse.runtime.matmul import Matmul, accepts, product_of
from megafuse.runtime.tailed import Tailed, built_sums, sums_call, tailed_product

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """A direction at fixed sizes. steps: a name for profiles, and what it does. program: the same
    unless the call is large. pitched: the inputs that have a pitch, with their strides and how to
    make room for one."""

    steps: list[tuple[str, Step]]
    results: list[Reader | None]
    program: Program | None
    pitched: list[tuple[int, tuple[int, ...], Allocator]]


class Executor:
    """One direction of a plan on one device.

    device: where every tensor lives. public: how many of the results, from the first, the caller
    gets; the others are only given to another executor, and may be pieces of an arena. Raises
    BuildError, ToolchainError.
    """

    def __init__(
        self, plan: GraphPlan, device: torch.device, options: Options, progress: Progress | None,
        public: int | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.device, self.options = plan, device, options
        self.spec: DeviceSpec = spec_for(device)
        self.built = self._build(progress or (lambda *_: None))
        self._other: dict[str, BuiltRegion] = {}  # for calls on the other side of MANY_ROWS
        self._sums: dict[str, BuiltRegion] = {}  # second steps of tails' column sums
        self.public = public
        self.recipes: dict[tuple[int, ...], Recipe] = {}
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
        device, serial = self.device.index, options.serial
        cuda = CudaModule(cubin, kernel.names, device, shared, serial)
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

    def run(self, inputs: list[Any], sizes: tuple[int, ...]) -> list[Any]:
        """inputs: the graph's inputs (None where nothing reads one), contiguous, as tensors or
        pieces; the list is emptied, so that a tensor nobody else holds is freed after its last use.
        sizes: values of the run-time sizes in order of name. Returns the graph's outputs (None
        where it has none)."""
        recipe = self.recipes.get(sizes)
        if recipe is None:
            recipe = self.recipes[sizes] = self._recipe(sizes)
        for i, steps, allocate in recipe.pitched:
            if type(inputs[i]) is not Piece and inputs[i].stride() != steps:
                # A hook on saved tensors brought it back in another layout.
                inputs[i] = allocate(self.device).copy_(inputs[i])
        profiled = torch.autograd._profiler_enabled()
        if recipe.program is not None and not profiled:
            results = recipe.program.run(inputs)
            if results is not None:
                return results
        values: Values = dict(zip(self.plan.graph.inputs, map(as_tensor, inputs), strict=True))
        inputs.clear()
        if profiled:
            for name, step in recipe.steps:
                with torch.profiler.record_function(name):
                    step(values)
        else:
            for _, step in recipe.steps:
                step(values)
        return [None if r is None else r(values) for r in recipe.results]

    def _recipe(self, sizes: tuple[int, ...]) -> Recipe:
        named = dict(zip(sorted(self.plan.graph.sizes), sizes, strict=True))
        works = [self._work(region, named) for region in self.plan.regions]
        steps: list[tuple[str, Step]] = []
        for i, work in enumerate(works):
            steps.append((work.region.name, work.step))
            if dead := [n for n, last in self._last.items() if last == i]:
                steps.append(("free", _free(dead)))
        results = [None if o is None else _view(o, named) for o in self.plan.results]
        program = None
        if not self.options.sanitize:  # which watches the edges of tensors
            program = program_of(
                self.plan, works, results, named, self.device, self.public, self._target
            )
        pitched = [
            (i, tuple(evaluate(d, named) for d in strides(node.room)), allocator(node, named))
            for i, node in enumerate(self.plan.graph.inputs) if node.room != node.shape
        ]  # fmt: skip
        return Recipe(steps, results, program, pitched)

    def _target(self) -> native.Target | None:
        return native.on_cuda(self.device.index) if self.device.type == "cuda" else native.on_host()

    def _work(self, region: Region, sizes: Mapping[str, int]) -> Work:
        if isinstance(region, RowRegion):
            call = RowCall(self.kernel(region, sizes), sizes, self.spec)
            room: dict[Any, int] = {call: call.workspace} if call.workspace else {}
            return Work(region, call.step(self.device), call.launches(), room)
        if isinstance(region, ExternRegion):
            return Work(region, self._extern_step(region, sizes))
        if region.tail is not None:
            return self._tailed_work(region, sizes)
        kernel = self._matmul_kernel(region, sizes)
        step = self._matmul_step(region, sizes, kernel)
        if kernel is None:
            return Work(region, step)
        room = {kernel: 4 * kernel.sums} if kernel.sums else {}
        return Work(region, step, self._launches(region, kernel), room)

    def _tailed_work(self, region: MatmulRegion, sizes: Mapping[str, int]) -> Work:
        plan, options, tail = self.plan, self.options, region.tail
        assert tail is not None
        product = None
        if self.device.type == "cuda":
            rounding = options.rounding == "eager"
            product = tailed_product(plan, region, sizes, rounding, self.spec.sm_count)
        if product is None:
            return Work(region, self._apart(region, sizes))
        sums = None
        if tail.sums:
            if region.name not in self._sums:
                device, serial = self.device.index, options.serial
                self._sums[region.name] = built_sums(plan, region, device, serial)
            sums = sums_call(self._sums[region.name], product, tail.each, sizes, self.spec)
        tailed = Tailed(region, product, sums, sizes, self.device, options,
                        lambda: self._apart(region, sizes))  # fmt: skip
        return tailed.work()

    def _apart(self, region: MatmulRegion, sizes: Mapping[str, int]) -> Step:
        """The product, then its tail's row region."""
        tail = region.tail
        assert tail is not None
        kept = region.node in region.writes()
        bare = replace(region, tail=None)
        product = self._matmul_step(bare, sizes, self._matmul_kernel(bare, sizes))
        rows = RowCall(self._build_region(tail.region, sizes), sizes, self.spec).step(self.device)

        def step(values: Values) -> None:
            product(values)
            rows(values)
            if not kept:
                del values[region.node]

        return step

    def _launches(self, region: MatmulRegion, kernel: Matmul) -> list[native.Launch]:
        rows = [o.buffer for kind, o in region.extras if kind == "row"]
        tensor = next((o.buffer for kind, o in region.extras if kind == "tensor"), None)
        somewhere = torch.empty(256, dtype=torch.uint8, device=self.device)
        buffers = [region.a.buffer, region.b.buffer, region.node, tensor, *rows]
        return kernel.launches(buffers, somewhere.data_ptr())

    def _row_step(self, built: BuiltRegion, sizes: Mapping[str, int]) -> Step:
        return RowCall(built, sizes, self.spec).step(self.device)

    def _matmul_step(
        self, region: MatmulRegion, sizes: Mapping[str, int], kernel: Matmul | None
    ) -> Step:
        a, b = _view(region.a, sizes), _view(region.b, sizes)
        node, device, allocate = region.node, self.device, allocator(region.node, sizes)
        single = evaluate(node.shape[0], sizes) == 1
        of_a, of_b = region.a.buffer, region.b.buffer
        of_rows = [o.buffer for kind, o in region.extras if kind == "row"]
        of_tensor = next((o.buffer for kind, o in region.extras if kind == "tensor"), None)
        extras = [_view(o, sizes) for _, o in region.extras]

        def step(values: Values) -> None:
            out = allocate(device)
            if kernel is not None:
                places = values[of_a].data_ptr(), values[of_b].data_ptr(), out.data_ptr()
                rows = [values[n].data_ptr() for n in of_rows]
                tensor = values[of_tensor].data_ptr() if of_tensor is not None else 0
                if kernel.aligned(*places, *rows, tensor):
                    stream = current_stream(device)
                    if kernel.sums:
                        workspace = torch.empty(kernel.sums, dtype=torch.float32, device=device)
                        kernel.launch(*places, stream, rows, tensor, workspace.data_ptr())
                    else:
                        kernel.launch(*places, stream, rows, tensor)
                    values[node] = out
                    return
            if extras:
                added = _added(a(values), b(values), [e(values) for e in extras])
                values[node] = added if node.room == node.shape else out.copy_(added)
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
        debug, serial = self.options.debug, self.options.serial
        return Matmul(product, self.device.index, debug=debug, serial=serial)

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
