"""A plan in words and numbers: what each region does, moves and costs, and why it ends there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megafuse.device import DeviceSpec
from megafuse.eager import Operator
from megafuse.fusion import cost
from megafuse.fusion.lifetimes import Buffers, place
from megafuse.fusion.plan import (
    ExternRegion,
    GraphPlan,
    MatmulRegion,
    Operand,
    Region,
    RowRegion,
    WhyNotFused,
)
from megafuse.fusion.summary import (
    Line,
    MatmulShape,
    OperatorSummary,
    PlanSummary,
    RegionSummary,
    Use,
)
from megafuse.ir import Node, evaluate, product
from megafuse.ops import is_pointwise, is_reduction, pointwise

Direction = Literal["forward", "backward"]
Engine = Callable[[MatmulRegion], str]
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear")


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
    tail = [o for _, o in region.tail.ins] if region.tail else []
    return [region.a, region.b, *(o for _, o in region.extras), *tail]


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
    if isinstance(region, MatmulRegion) and region.tail is not None:
        kept = region.node.type.nbytes if region.node in region.writes() else 0
        return evaluate(kept, sizes) + written_bytes(region.tail.region, sizes)
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
    if isinstance(region, MatmulRegion) and region.tail is not None:
        return [region.node, *computed(region.tail.region)]
    return [region.node]


def flops(region: Region, sizes: Mapping[str, int]) -> int:
    if isinstance(region, MatmulRegion):
        return evaluate(region.flops, sizes)
    if isinstance(region, ExternRegion):
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


def _reason(a: Region, b: Region, node: Node, refused: Mapping[tuple[str, str], str]) -> str:
    if isinstance(b, MatmulRegion):
        if node not in (b.a.buffer, b.b.buffer):
            return ("a product's kernel reads what goes with its result from memory, a tile at a "
                    "time")  # fmt: skip
        if isinstance(a, MatmulRegion):
            return "a product reads its operand many times, so it is complete in memory first"
        return ("a product reads each element of its operands once for every output tile beside "
                "it, so they are written once and read from memory")  # fmt: skip
    if isinstance(a, ExternRegion) or isinstance(b, ExternRegion):
        return "PyTorch runs the operator on one side, which reads and writes memory"
    if isinstance(a, MatmulRegion):
        consumers = {n.name for r in b.roots for n in (r.node, r.target)}
        for (producer, consumer), reason in refused.items():
            if producer == a.node.name and consumer in consumers:
                return reason
        return ("a row of a product's result spans many output tiles, so what needs whole rows "
                "waits, and the rest rides along in their walk")  # fmt: skip
    names_a = {n.name for r in a.roots for n in (r.node, r.target)}
    names_b = {n.name for r in b.roots for n in (r.node, r.target)}
    for (producer, consumer), reason in refused.items():
        if producer in names_a and consumer in names_b:
            return reason
    if any(r.kind == "column" and r.target is node for r in a.roots):
        return "a sum over rows is complete only when every row has been walked"
    return "another region between them needs the first one complete"


def refusals(plan: GraphPlan) -> dict[str, list[WhyNotFused]]:
    """For each region, the merges with others that were tried and refused, one a pair: the region
    as it ended up, and the last reason given."""
    home: dict[str, str] = {}
    for region in plan.regions:
        rows = region.tail.region if isinstance(region, MatmulRegion) and region.tail else region
        roots = rows.roots if isinstance(rows, RowRegion) else []
        for node in [*region.writes(), *(n for r in roots for n in (r.node, r.target))]:
            home.setdefault(node.name, region.name)
    found: dict[tuple[str, str], str] = {}
    for why in plan.refused:
        a, b = home.get(why.producer), home.get(why.consumer)
        if a is not None and b is not None and a != b:
            found[a, b] = why.reason
    result: dict[str, list[WhyNotFused]] = {r.name: [] for r in plan.regions}
    for (a, b), reason in found.items():
        result[a].append(WhyNotFused(a, b, reason))
    return result


def lines_of(region: Region, direction: Direction) -> tuple[Line, ...]:
    """The user's lines that a region computes, each with its operators; casts are left out where
    anything else is there to name."""
    found: dict[tuple[str, str, bool], dict[str, None]] = {}
    nodes = computed(region)
    if not nodes and isinstance(region, RowRegion):  # rearranges elements and computes nothing
        nodes = [r.node for r in region.roots]
    for node in nodes:
        origin = node.origin
        again = direction == "backward" and origin.direction == "forward" and is_pointwise(node)
        key = origin.location or origin.op, origin.module or "", again
        name = str(node.attrs["target"]) if node.op == "extern" else origin.op or node.op
        known = is_pointwise(node) or is_reduction(node) or not isinstance(region, RowRegion)
        found.setdefault(key, {})[_short(name) if known else "copy"] = None
    return tuple(
        Line(location, module, tuple(n for n in names if n != "cast") or ("cast",), again)
        for (location, module, again), names in found.items()
    )


def _short(name: str) -> str:
    """`aten.native_layer_norm.default` → `native_layer_norm`."""
    parts = name.split(".")
    name = parts[1] if len(parts) > 1 else name
    return "cast" if name == "_to_copy" else name


def summarize(
    plan: Any,
    sizes: Mapping[str, int],
    spec: DeviceSpec,
    names: Sequence[str] = (),
    engine: Engine = lambda region: "",
) -> PlanSummary:
    """plan: a `megafuse.compiler.Plan`. Bytes count each tensor a region reads or writes once.

    names: of the call's flat tensors, where they are known; engine: says what runs a product.
    """
    regions: list[RegionSummary] = []
    matmuls: list[MatmulShape] = []
    buffers = Buffers(plan, sizes, names)
    for graph_plan in (plan.forward, plan.backward):
        if graph_plan is None:
            continue
        why, refused = boundaries(graph_plan), refusals(graph_plan)
        for region in graph_plan.regions:
            told = {w.consumer for w in why[region.name]}
            tried = [w for w in refused[region.name] if w.consumer not in told]
            regions.append(
                _summary(graph_plan, region, sizes, spec, why[region.name], tried, buffers, engine)
            )
            if isinstance(region, MatmulRegion):
                matmuls.append(_shape(region, sizes, graph_plan.direction))
    saved = sum(evaluate(n.type.nbytes, sizes) for n in plan.split.saved)
    unfused = _unfused(plan.captured.eager(), regions, sizes)
    return PlanSummary(
        tuple(regions),
        sum(o.bytes_read + o.bytes_written for o in unfused),
        sum(r.bytes_read + r.bytes_written for r in regions),
        sum(r.flops for r in regions if r.kind == "matmul"),
        saved,
        tuple(matmuls),
        buffers.summaries(),
        unfused,
    )


def _summary(
    plan: GraphPlan, region: Region, sizes: Mapping[str, int], spec: DeviceSpec,
    why: list[WhyNotFused], tried: list[WhyNotFused], buffers: Buffers, engine: Engine,
) -> RegionSummary:  # fmt: skip
    reads = [Use(buffers.name(n), read_bytes(region, n, plan.buffers, sizes))
             for n in region.reads(plan.buffers)]  # fmt: skip
    read, written = sum(u.nbytes for u in reads), written_bytes(region, sizes)
    work = flops(region, sizes)
    kernels: tuple[str, ...] = ()
    launches, again = 1, 0.0
    if isinstance(region, RowRegion):
        again = cost.sectors_again(region, sizes)
        kernels = (f"mf_{region.name}",)
    tail = region.tail if isinstance(region, MatmulRegion) else None
    rows = tail.region if tail else region
    if isinstance(rows, RowRegion) and any(r.kind == "column" for r in rows.roots):
        kernels += (f"mf_{region.name}_finish",)
        launches = 2
    dtype = None if isinstance(region, RowRegion) else region.node.dtype
    seconds = cost.seconds(read + written, work, launches, spec, dtype, again)
    ops = dict.fromkeys(place(n) for n in computed(region))
    sentence = "; ".join(f"→ {w.consumer}: {w.reason}" for w in why)
    return RegionSummary(
        region.name, plan.direction, region.kind, tuple(ops), read, written, work,
        seconds * 1e3, launches, kernels,
        sentence or "its results leave the graph",
        lines_of(region, plan.direction), tuple(reads),
        tuple(Use(buffers.name(n), evaluate(n.type.nbytes, sizes)) for n in region.writes()),
        tuple(why), tuple(tried),
        engine(region) if isinstance(region, MatmulRegion) else "",
    )  # fmt: skip


def _unfused(
    operators: Sequence[Operator], regions: Sequence[RegionSummary], sizes: Mapping[str, int]
) -> tuple[OperatorSummary, ...]:
    """Each operator of the unfused graph with the regions that hold its line: those of its own
    kind, product or not, where there are any."""
    homes: dict[tuple[str, str], list[tuple[RegionSummary, Line]]] = {}
    for region in regions:
        for line in region.lines:
            if not line.recomputed:
                homes.setdefault((str(line), region.direction), []).append((region, line))
    result = []
    for op in operators:
        name, origin = _short(op.origin.op), op.origin
        where = str(Line(origin.location or origin.op, origin.module or "", ()))
        written = evaluate(op.written, sizes)
        at = _homes_of(name, written, homes.get((where, origin.direction), []))
        result.append(OperatorSummary(
            op.name, name, where, origin.direction, op.sources, evaluate(op.read, sizes), written,
            tuple(r.name for r in at),
        ))  # fmt: skip
    return tuple(result)


def _homes_of(
    name: str, written: int, places: Sequence[tuple[RegionSummary, Line]]
) -> list[RegionSummary]:
    """Of the regions that hold a line, those that may hold its operator `name`."""
    if name in PRODUCTS:  # one line may hold several
        products = [r for r, _ in places if r.kind in ("matmul", "extern")]
        alike = [r for r in products if r.bytes_written == written]
        return alike or products or [r for r, _ in places]
    named = [r for r, line in places if name in line.ops]
    if named:
        return named
    copies = [r for r, line in places if line.ops == ("copy",)]
    if name in ("clone", "stack", "cat", "_to_copy"):
        return copies
    return [r for r, line in places
            if r not in copies and (r.kind != "matmul" or _beside_products(line))]  # fmt: skip


def _beside_products(line: Line) -> bool:
    """Whether a product's region computes something else of that line, in its tail."""
    return any(op not in PRODUCTS for op in line.ops)


def _shape(region: MatmulRegion, sizes: Mapping[str, int], direction: Direction) -> MatmulShape:
    batch, m, k = (evaluate(d, sizes) for d in region.a.shape)
    n = evaluate(region.b.shape[2], sizes)
    return MatmulShape(batch, m, n, k, region.a.strides[2] != 1, region.b.strides[2] != 1,
                       region.node.dtype, direction)  # fmt: skip
