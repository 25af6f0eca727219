"""A product and the row region behind it in one kernel; apart where the kernel cannot have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.matmul import ARCH
from megafuse.codegen.rows import RowKernel, emit_rows
from megafuse.codegen.tail import emit_tail
from megafuse.config import Options
from megafuse.device import DeviceSpec
from megafuse.fusion.plan import GraphPlan, MatmulRegion
from megafuse.ir import Node
from megafuse.runtime.arena import Work
from megafuse.runtime.built import BuiltRegion, RowCall, Step, Values, allocator, current_stream
from megafuse.runtime.cuda import Cubin, CudaModule, compile_cubin
from megafuse.runtime.matmul import Matmul, cut_of, partials
from megafuse.runtime.product import Product, accepts, product_of


def tailed_product(
    plan: GraphPlan, region: MatmulRegion, sizes: Mapping[str, int], rounding: bool, sm_count: int
) -> Product | None:
    """The product with its tail, or None where the two run apart: the kernel refuses them, or k
    had better be split."""
    assert region.tail is not None
    code = emit_tail(region.node, region.tail, plan.buffers, rounding)
    product = product_of(region, sizes, code.body)
    if accepts(product) is not None or cut_of(product, sm_count).splits > 1:
        return None
    return product


def emit_sums(plan: GraphPlan, region: MatmulRegion) -> tuple[RowKernel, Cubin]:
    """The second step of a tail's column sums: that of its row region, whose first step is left
    out. With one team a block it takes partial sums as they lie. Needs no GPU."""
    assert region.tail is not None
    rows = region.tail.region
    layout = replace(next(cuda_schedules(rows, plan.rows_of(rows))), teams=1, blocks=1)
    kernel = emit_rows(rows, plan.buffers, layout, False, f"mf_{region.name}")
    assert kernel.finish is not None
    source = kernel.source.replace(f"MF_KERNEL({kernel.name})\n", "")
    return kernel, compile_cubin(source, [kernel.finish], ARCH, fast=kernel.fast)


def built_sums(plan: GraphPlan, region: MatmulRegion, device: int, serial: bool) -> BuiltRegion:
    """The same, loaded."""
    assert region.tail is not None
    kernel, cubin = emit_sums(plan, region)
    assert kernel.finish is not None
    module = CudaModule(cubin, [kernel.finish], device, serial=serial)
    return BuiltRegion(region.tail.region, kernel, module, 1)


class Tailed:
    """One product with a tail at fixed sizes."""

    def __init__(
        self, region: MatmulRegion, product: Product, sums: RowCall | None,
        sizes: Mapping[str, int], device: torch.device, options: Options,
        apart: Callable[[], Step],
    ) -> None:  # fmt: skip
        """sums: the launch that adds up partial sums, where there are any. apart: makes the step
        that runs where an operand's address does not suit the kernel."""
        assert region.tail is not None and device.index is not None
        self.region, self.sums, self.device = region, sums, device
        debug, serial = options.debug, options.serial
        self.kernel = Matmul(product, device.index, debug=debug, serial=serial)
        self._apart = apart
        self._made: Step | None = None
        self._new = [(n, allocator(n, sizes)) for n in region.writes()]
        rows = [o.buffer for _, o in region.extras]
        outs = [o.buffer for _, o in region.tail.outs]
        ins = [o.buffer for _, o in region.tail.ins]
        self._operands: list[Node] = [region.a.buffer, region.b.buffer, *outs, *ins, *rows]

    def step(self, values: Values) -> None:
        """Allocates what the region writes, then launches it."""
        device, sums = self.device, self.sums
        before = set(values)
        for node, allocate in self._new:
            if node not in values:  # a concatenation has other writers too
                values[node] = allocate(device)
        pointers = [values[n].data_ptr() for n in self._operands]
        if not self.kernel.aligned(*pointers):
            for node, _ in self._new:
                if node not in before:
                    del values[node]
            if self._made is None:
                self._made = self._apart()
            self._made(values)
            return
        stream = current_stream(device)
        if sums is None:
            self.kernel.launch_at(tuple(pointers), stream)
            return
        workspace = torch.empty(sums.workspace, dtype=torch.uint8, device=device)
        places = [workspace.data_ptr()] * len(sums.partials)
        self.kernel.launch_at((*pointers, *places), stream)
        sums.launch(values, places[0], stream)

    def work(self) -> Work:
        somewhere = torch.empty(256, dtype=torch.uint8, device=self.device).data_ptr()
        buffers: list[object] = [*self._operands]
        if self.sums is None:
            return Work(self.region, self.step, self.kernel.launches(buffers, somewhere))
        buffers += [self.sums] * len(self.sums.partials)
        launches = [*self.kernel.launches(buffers, somewhere), *self.sums.launches()]
        return Work(self.region, self.step, launches, {self.sums: self.sums.workspace})


def sums_call(
    built: BuiltRegion, product: Product, each: bool, sizes: Mapping[str, int], spec: DeviceSpec
) -> RowCall:
    """each: every batch keeps a column sum of its own."""
    parts = partials(product)
    chunks = parts // max(product.batch, 1) if each else parts
    return RowCall(built, sizes, spec, parts, chunks)
