"""Row regions that follow a product element by element, done on its tiles: see `plan.Tail`.

Before → after, for executors whose products can do that (16-bit ones on Hopper):
    matmul → rows            matmul with a tail

Runs on finished plans: the row region stays as it was grown, and is what runs where a product goes
to PyTorch after all. Legal: the region has no row reductions, reads the product once, at its own
place, and all else it reads or writes is a tensor of the product's shape with whole rows. Worth it:
its instructions fit under the tensor cores' time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from megafuse.fusion.align import Mismatch
from megafuse.fusion.plan import (
    MatmulRegion,
    Merge,
    Operand,
    Region,
    Root,
    RowRegion,
    Stage,
    Tail,
    WhyNotFused,
)
from megafuse.index import Axis, Coords, offset, operand_coords, strides
from megafuse.ir import Dim, Node, as_dim, evaluate
from megafuse.ops import is_reduction, is_view, pointwise

MOST_INS, MOST_OUTS, MOST_SUMS = 3, 3, 4
"""Tensors beside the product, tensors written, and column sums: what sm90/tail.cuh has room for."""

# For a tile of 128x256, of which a multiprocessor has one at a time, the tensor cores take 16
# cycles a k, and a scheduler, with two of the eight warps, 256 for an instruction on every element.
# On an H200 tails that issued for half of that time saved 10-17 % of product and kernel, for two
# thirds 6 %; for all of it they cost 3 %. An element's way through staging is instructions too.
_CYCLES_OF_K, _CYCLES_OF_INSTRUCTION, _MOST = 16, 256, 0.7
_MOVE, _STAGING = 2, 6


def absorb(
    regions: Sequence[Region], buffers: set[Node], sizes: Mapping[str, int],
    results: Sequence[Operand | None], fuel: int | None,
) -> tuple[list[Region], list[Merge], list[WhyNotFused]]:  # fmt: skip
    """`regions`, in execution order, with tails where the rules and the cost allow them; at most
    `fuel` of them."""
    kept, merges, refused = list(regions), list[Merge](), list[WhyNotFused]()
    shown = {o.buffer for o in results if o is not None}
    for region in regions:
        if not isinstance(region, RowRegion) or region.kind == "group":
            continue
        read = set(region.reads(buffers))
        for before in reversed(kept):
            if fuel is not None and len(merges) >= fuel:
                break
            if not isinstance(before, MatmulRegion) or before.node not in read or before.tail:
                continue
            try:
                _check_order(before, region, kept, buffers)
                others = {n for r in kept if r is not region for n in r.reads(buffers)} | shown
                tail = _tail(before, region, buffers, before.node in others)
                _check_cost(before, tail, buffers, sizes)
            except Mismatch as reason:
                refused.append(WhyNotFused(before.node.name, region.roots[-1].node.name,
                                           str(reason)))  # fmt: skip
                continue
            merged = MatmulRegion(before.node, before.a, before.b, before.extras, tail)
            kept[kept.index(region)] = merged
            kept.remove(before)
            merges.append(Merge(before, region, merged))
            break
    return kept, merges, refused


def _check_order(
    before: MatmulRegion, region: RowRegion, regions: Sequence[Region], buffers: set[Node]
) -> None:
    """The product moves to where the row region is: nobody between may need it."""
    between = regions[regions.index(before) + 1 : regions.index(region)]
    for other in between:
        if before.node in other.reads(buffers):
            raise Mismatch("another region needs the product before the row region's turn")


def _tail(before: MatmulRegion, region: RowRegion, buffers: set[Node], needed: bool) -> Tail:
    stage = region.stages[0]
    node = before.node
    if any(root.kind == "row" for root in stage.roots):
        raise Mismatch("a tile does not hold whole rows, which a reduction over the row needs")
    if any(kind == "tensor" for kind, _ in before.extras):
        raise Mismatch("the product's kernel already adds a tensor of its own accord")
    if node.dtype.itemsize != 2:
        raise Mismatch("the kernel keeps a product of 16 bits an element")
    # What is written and read in this very walk is at hand.
    made = {(root.target, root.where) for root in stage.roots if root.kind == "store"}
    reads = {(r.node, r.coords): r for root in stage.roots for r in root.reads
             if (r.node, r.coords) not in made}  # fmt: skip
    if any(n in region.writes() for n, _ in reads):
        raise Mismatch("it reads what it writes itself elsewhere")
    own = [coords for n, coords in reads if n is node]
    if len(own) != 1:
        raise Mismatch("the product is read at several places at once")
    place = _Place.of(own[0], node, stage)
    ins = tuple((read, place.operand(read.node, read.coords, "reads"))
                for read in reads.values() if read.node is not node)  # fmt: skip
    stores = [root for root in stage.roots if root.kind == "store"]
    outs: list[tuple[Root | None, Operand]] = [
        (root, place.operand(root.target, root.where, "writes")) for root in stores
    ]
    if needed:
        outs.insert(0, (None, Operand(node, node.shape, tuple(strides(node.room)), 0)))
    sums = tuple(root for root in stage.roots if root.kind == "column")
    each = _check_sums(sums, stage, place)
    for operand in (o for _, o in (*ins, *outs)):
        if operand.buffer.dtype != node.dtype:
            raise Mismatch(f"{operand.buffer.name} is {operand.buffer.dtype}, not {node.dtype}")
        _check_address(operand)
    if any(_shares_pieces(operand) for _, operand in outs):
        raise Mismatch("rows of a result end inside 16 bytes that others share")
    if sums and _partial(node.shape[2]):
        raise Mismatch("column sums of a tail are of whole pieces of 16 bytes")
    counts = (len(ins), MOST_INS), (len(outs), MOST_OUTS), (len(sums), MOST_SUMS)
    if any(count > most for count, most in counts) or not outs:
        raise Mismatch(
            f"it reads {len(ins)} tensors, writes {len(outs)} and sums {len(sums)}: more than "
            "staging has room for"
        )
    return Tail(region, ins, tuple(outs), sums, each)


def _partial(extent: Dim) -> bool:
    """Whether so many elements are known to be no multiple of 16 bytes."""
    return isinstance(extent, int) and extent % 8 != 0


def _check_address(operand: Operand) -> None:
    """Refuse, of what is known now, what the copy engine cannot address: the row region can."""
    batch, rows, _ = operand.shape
    steps = [s for s, extent in zip(operand.strides, (batch, rows), strict=False) if extent != 1]
    if any(map(_partial, (*steps, operand.offset))):
        name = operand.buffer.name
        raise Mismatch(f"the rows of {name} do not all start at multiples of 16 bytes")


def _shares_pieces(operand: Operand) -> bool:
    """The copy engine writes whole pieces: what is left of a row's last one must be its own."""
    columns = operand.shape[2]
    return isinstance(columns, int) and _partial(columns) and (
        operand.strides[1] != columns + -columns % 8)  # fmt: skip


class _Place:
    """Which axes of a stage walk the product's batch, rows and columns, innermost first."""

    def __init__(self, shape: tuple[Dim, ...], axes: list[list[tuple[Axis, Dim]]]) -> None:
        self.shape, self.axes = shape, axes

    @classmethod
    def of(cls, coords: Coords, node: Node, stage: Stage) -> _Place:
        axes: list[list[tuple[Axis, Dim]]] = []
        for coordinate, extent in zip(coords, node.shape, strict=True):
            terms = coordinate.sorted_terms()[::-1]
            step: Dim = 1
            for axis, weight in terms:
                if as_dim(weight - step) != 0:
                    raise Mismatch("the product is not read element by element")
                step = as_dim(step * axis.extent)
            if coordinate.const != 0 or as_dim(step - extent) != 0:
                raise Mismatch("only a part of the product is read")
            axes.append(terms)
        walked = [axis for terms in axes for axis, _ in terms]
        moving = {a for a in stage.axes if a.extent != 1}
        if len(set(walked)) != len(walked) or moving != set(walked):
            raise Mismatch("the product is read more than once an element")
        return cls(node.shape, axes)

    def operand(self, node: Node, coords: Coords, verb: str) -> Operand:
        """`node` at `coords` as a strided tensor of the product's shape."""
        form = offset(coords, node.room)
        steps: list[Dim] = []
        for terms in self.axes:
            step: Dim | None = None
            for axis, weight in terms:
                stride = form.coefficient(axis)
                if step is None:
                    step = stride
                elif as_dim(stride - step * weight) != 0:
                    raise Mismatch(f"it {verb} {node.name} in another order than the product's")
            steps.append(0 if step is None else step)
        if self.axes[2] and steps[2] != 1:
            raise Mismatch(f"it {verb} {node.name} otherwise than along the product's rows")
        if self.axes[1] and steps[1] == 0:
            raise Mismatch(f"it {verb} {node.name} once for all rows of the product")
        if verb == "writes" and self.axes[0] and steps[0] == 0:
            raise Mismatch(f"it {verb} {node.name} once for all batches")
        full = strides(self.shape)
        found = [s if terms else f for s, f, terms in zip(steps, full, self.axes, strict=True)]
        return Operand(node, self.shape, tuple(found), form.const)


def _check_sums(sums: Sequence[Root], stage: Stage, place: _Place) -> bool:
    """Whether the column sums leave each batch one of its own. Raises Mismatch."""
    batch, rows, columns = ([axis for axis, _ in reversed(terms)] for terms in place.axes)
    each: set[bool] = set()
    for root in sums:
        reduced = set(root.reduced)
        if [a for a in stage.settled_cols() if a.extent != 1] != columns or reduced & set(columns):
            raise Mismatch("a column sum is not over the product's rows")
        if not reduced >= set(rows):
            raise Mismatch("a column sum keeps some rows of the product apart")
        if reduced & set(batch) and not reduced >= set(batch):
            raise Mismatch("a column sum keeps some batches apart")
        each.add(bool(batch) and not reduced & set(batch))
    if len(each) > 1:
        raise Mismatch("some column sums are over all batches and some are not")
    return each == {True}


def _check_cost(
    before: MatmulRegion, tail: Tail, buffers: set[Node], sizes: Mapping[str, int]
) -> None:
    steps = instructions(tail, buffers)
    k = evaluate(before.a.shape[2], sizes)
    if steps * _CYCLES_OF_INSTRUCTION > _MOST * k * _CYCLES_OF_K:
        raise Mismatch(
            f"about {steps} instructions an element are more than a sum over {k} leaves time for"
        )


def instructions(tail: Tail, buffers: set[Node]) -> int:
    """About how many an element takes: arithmetic, and unpacking and packing."""
    seen: dict[tuple[Node, Coords], int] = {}

    def visit(node: Node, coords: Coords, expand: bool = False) -> None:
        if (node, coords) in seen or (node in buffers and not expand) or is_reduction(node):
            return
        seen[node, coords] = 0
        entry = pointwise.TABLE.get(node.op)
        if entry is not None and not is_view(node) and node.op != "cast":
            seen[node, coords] = entry.flops
        if any(isinstance(x, sympy.Basic) for x in (*node.args, node.attrs.get("value"))):
            raise Mismatch("it computes with a run-time size, which the kernel is not told")
        for operand in node.inputs:
            visit(operand, operand_coords(node, operand, coords))

    for root in tail.region.roots:
        if root.kind == "store":
            visit(root.node, root.at, root.target is root.node)
        else:
            visit(root.node.inputs[0], root.at)
    moved = len(tail.ins) + len(tail.outs) + 2 * len(tail.sums)
    return sum(seen.values()) + _MOVE * moved + _STAGING
