"""A plan in words and numbers: what each region does, moves and costs, and why it ends there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megafuse.device import DeviceSpec
from megafuse.errors import InputError
from megafuse.fusion import cost
from megafuse.fusion.plan import (
    ExternRegion,
    GraphPlan,
    MatmulRegion,
    Operand,
    Region,
    RowRegion,
    WhyNotFused,
)
from megafuse.fusion.summary import MatmulShape, PlanSummary, RegionSummary
from megafuse.ir import Node, evaluate, product
from megafuse.ops import is_pointwise, is_reduction, pointwise

Direction = Literal["forward", "backward"]


def read_bytes(region: Region, node: Node, buffers: set[Node], sizes: Mapping[str, int]) -> int:
    """Bytes of `node` that `region` reads: the distinct elements, each once."""
    whole = evaluate(node.type.nbytes, sizes)
    if not isinstance(region, RowRegion):
        views = {_elements(o, sizes): o for o in _operands(region) if o.buffer is node}
        return min(whole, sum(n * node.dtype.itemsize for n, _ in views))
    seen: dict[Any, int] = {}
    for root in region.roots:
        for read in root.reads:
            if read.node is node:
                axes = set().union(*(c.axes for c in read.coords)) if read.coords else set()
                seen[read.coords] = evaluate(product(a.extent for a in axes), sizes)
    return min(whole, sum(seen.values()) * node.dtype.itemsize)


def _operands(region: MatmulRegion | ExternRegion) -> list[Operand]:
    if isinstance(region, ExternRegion):
        return region.operands
    return [region.a, region.b, *(o for _, o in region.extras)]


def _elements(operand: Operand, sizes: Mapping[str, int]) -> tuple[int, int]:
    """(how many elements an operand holds, where it starts): equal for one tensor read twice."""
    moving = [d for d, stride in zip(operand.shape, operand.strides, strict=True) if stride != 0]
    return evaluate(product(moving), sizes), evaluate(operand.offset, sizes)


def written_bytes(region: Region, sizes: Mapping[str, int]) -> int:
    """Bytes that `region` writes: of a concatenation only its own parts."""
    if isinstance(region, RowRegion):
        stored = [r for r in region.roots if r.kind != "row"]
        axes = [set().union(*(c.axes for c in r.where)) if r.where else set() for r in stored]
        return sum(
            evaluate(product(a.extent for a in own), sizes) * r.target.dtype.itemsize
            for r, own in zip(stored, axes, strict=True)
        )
    return sum(evaluate(n.type.nbytes, sizes) for n in region.writes() if n.op != "extern"
               or not n.attrs["multiple"])  # fmt: skip


def computed(region: Region) -> list[Node]:
    """The nodes a region computes, in graph order."""
    if isinstance(region, RowRegion):
        own = set(region.writes())
        found: dict[Node, None] = {}

        def visit(node: Node, stop: set[Node]) -> None:
            if node in found or node.op in ("input", "matmul", "extern", "item") or node in stop:
                return
            for operand in node.inputs:
                visit(operand, stop)
            if is_pointwise(node) or is_reduction(node):
                found[node] = None

        reads = {r.node for root in region.roots for r in root.reads} - own
        stop = {n for n in reads if not is_reduction(n)}
        for root in region.roots:
            visit(root.node, stop - {root.node})
        return list(found)
    return [region.node]


def flops(region: Region, sizes: Mapping[str, int]) -> int:
    if isinstance(region, MatmulRegion):
        return evaluate(region.flops, sizes)
    if isinstance(region, ExternRegion):
        if region.node.attrs["target"] in ("aten.addmm.default", "aten.baddbmm.default"):
            inner = region.node.inputs[1].shape[-1]
            return 2 * evaluate(region.node.type.numel, sizes) * evaluate(inner, sizes)
        return 0
    total = 0
    for node in computed(region):
        each = pointwise.TABLE[node.op].flops if node.op in pointwise.TABLE else 1
        shape = node.inputs[0].type if is_reduction(node) else node.type
        total += each * evaluate(shape.numel, sizes)
    return total


def boundaries(plan: GraphPlan) -> dict[str, list[WhyNotFused]]:
    """For each region, why it is not one with each region that reads what it writes."""
    result: dict[str, list[WhyNotFused]] = {}
    refused = {(w.producer, w.consumer): w.reason for w in plan.refused}
    for i, region in enumerate(plan.regions):
        reasons: list[WhyNotFused] = []
        for later in plan.regions[i + 1 :]:
            shared = [n for n in region.writes() if n in later.reads(plan.buffers)]
            if shared:
                reason = _reason(region, later, shared[0], refused)
                reasons.append(WhyNotFused(region.name, later.name, reason))
        result[region.name] = reasons
    return result


def _reason(
    a: Region, b: Region, node: Node, refused: Mapping[tuple[str, str], str]
) -> str:
    row = node.shape[-1] if node.shape else 1
    if isinstance(b, MatmulRegion):
        if isinstance(a, MatmulRegion):
            return "a product reads its operand many times, so it is complete in memory first"
        return (f"the product reads each element of {node.type} once for every output tile beside "
                "it, so it is written once and read from memory")  # fmt: skip
    if isinstance(a, ExternRegion) or isinstance(b, ExternRegion):
        return "PyTorch runs the operator on one side, which reads and writes memory"
    if isinstance(a, MatmulRegion):
        return (f"a row of {node.type} has {row} elements and spans many output tiles, so what "
                "needs whole rows waits, and the rest rides along in their walk")  # fmt: skip
    names_a = {n.name for r in a.roots for n in (r.node, r.target)}
    names_b = {n.name for r in b.roots for n in (r.node, r.target)}
    for (producer, consumer), reason in refused.items():
        if producer in names_a and consumer in names_b:
            return reason
    if any(r.kind == "column" and r.target is node for r in a.roots):
        return "a sum over rows is complete only when every row has been walked"
    return "another region between them needs the first one complete"


def summarize(plan: Any, sizes: Mapping[str, int], spec: DeviceSpec) -> PlanSummary:
    """plan: a `megafuse.compiler.Plan`. Bytes count each tensor a region reads or writes once."""
    regions: list[RegionSummary] = []
    matmuls: list[MatmulShape] = []
    for graph_plan in (plan.forward, plan.backward):
        if graph_plan is None:
            continue
        why = boundaries(graph_plan)
        for region in graph_plan.regions:
            regions.append(_summary(graph_plan, region, sizes, spec, why[region.name]))
            if isinstance(region, MatmulRegion):
                matmuls.append(_shape(region, sizes, graph_plan.direction))
    saved = sum(evaluate(n.type.nbytes, sizes) for n in plan.split.saved)
    return PlanSummary(
        tuple(regions),
        evaluate(plan.captured.eager_bytes(), sizes),
        sum(r.bytes_read + r.bytes_written for r in regions),
        sum(r.flops for r in regions if r.kind == "matmul"),
        saved,
        tuple(matmuls),
    )


def _summary(
    plan: GraphPlan, region: Region, sizes: Mapping[str, int], spec: DeviceSpec,
    why: list[WhyNotFused],
) -> RegionSummary:  # fmt: skip
    read = sum(read_bytes(region, n, plan.buffers, sizes) for n in region.reads(plan.buffers))
    written = written_bytes(region, sizes)
    work = flops(region, sizes)
    kernels: tuple[str, ...] = ()
    launches = 1
    if isinstance(region, RowRegion):
        kernels = (f"mf_{region.name}",)
        if any(r.kind == "column" for r in region.roots):
            kernels += (f"mf_{region.name}_finish",)
            launches = 2
    dtype = None if isinstance(region, RowRegion) else region.node.dtype
    seconds = cost.seconds(read + written, work, launches, spec, dtype)
    ops = dict.fromkeys(_label(n) for n in computed(region))
    sentence = "; ".join(f"→ {w.consumer}: {w.reason}" for w in why)
    return RegionSummary(
        region.name, plan.direction, region.kind, tuple(ops), read, written, work,
        seconds * 1e3, launches, kernels,
        sentence or "its results leave the graph",
    )  # fmt: skip


def _label(node: Node) -> str:
    origin = node.origin
    where = f"{origin.location or ''}{f' ({origin.module})' if origin.module else ''}".strip()
    return where or origin.op


def _shape(region: MatmulRegion, sizes: Mapping[str, int], direction: Direction) -> MatmulShape:
    batch, m, k = (evaluate(d, sizes) for d in region.a.shape)
    n = evaluate(region.b.shape[2], sizes)
    return MatmulShape(batch, m, n, k, region.a.strides[2] != 1, region.b.strides[2] != 1,
                       region.node.dtype, direction)  # fmt: skip


def explain(fused: Any, *inputs: Any, **kwargs: Any) -> str:
    """The text of `megafuse.explain`."""
    from megafuse.device import H200, spec_for

    if inputs or kwargs:
        call = fused._call(inputs, kwargs)
        if call is None:
            raise InputError("this call runs the original module; there is no plan to explain")
        compiled, tensors, _ = call
        sizes = compiled.plan.sizes_of(tensors)
    else:
        plans = [p for same in fused._plans.values() for p in same]
        if not plans:
            raise InputError("no plan yet: call the module, or pass example inputs to explain")
        compiled = plans[-1]
        sizes = compiled.plan.hints
    spec = spec_for(compiled.device) if compiled.device.type == "cuda" else H200
    summary = summarize(compiled.plan, sizes, spec)
    return render(summary, sizes, spec)


def render(summary: PlanSummary, sizes: Mapping[str, int], spec: DeviceSpec) -> str:
    """One paragraph a region; bytes in MB (10^6), predicted times for `spec`."""
    at = ", ".join(f"{k}={v}" for k, v in sizes.items())
    lines = [f"megafuse plan{f' at {at}' if at else ''}; times predicted for {spec.name}"]
    for direction in ("forward", "backward"):
        mine = [r for r in summary.regions if r.direction == direction]
        if mine:
            total = sum(r.predicted_ms for r in mine)
            lines += ["", f"{direction}: {len(mine)} regions, {total:.3f} ms predicted"]
        for r in mine:
            work = f"{r.flops / 1e9:.1f} GFLOP, " if r.kind == "matmul" else ""
            lines.append(
                f"  {r.name:<4}{r.kind:<7} reads {r.bytes_read / 1e6:.2f} MB, writes "
                f"{r.bytes_written / 1e6:.2f} MB, {work}{r.predicted_ms * 1e3:.1f} us"
            )
            lines.append(f"       from {_shorten(r.ops)}")
            lines += [f"       {part}" for part in r.why.split("; →")[:1]]
            lines += [f"       →{part}" for part in r.why.split("; →")[1:]]
    lines += [
        "",
        f"moves {summary.fused_bytes / 1e6:.2f} MB; one operator at a time moves "
        f"{summary.unfused_bytes / 1e6:.2f} MB. Saved for backward: "
        f"{summary.saved_bytes / 1e6:.2f} MB.",
    ]
    return "\n".join(lines)


def _shorten(ops: tuple[str, ...], most: int = 6) -> str:
    shown = ", ".join(ops[:most])
    return shown + (f" and {len(ops) - most} more" if len(ops) > most else "")
