"""How a stage's tensors are walked: where they lie, and which row axes they walk as one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from megafuse.fusion.plan import RowRegion, Stage
from megafuse.index import Affine, Axis, offset
from megafuse.ir import Node, as_dim, product

CACHED = 16_384
"""Bytes of a tensor that stays in the nearest cache however often its rows are read."""


def is_small(node: Node) -> bool:
    """Whether rows of the tensor are read where they are used, from the nearest cache."""
    numbers = [d for d in node.shape if isinstance(d, int)]
    return len(numbers) == len(node.shape) and math.prod(numbers) * node.dtype.itemsize <= CACHED


def operands(stage: Stage) -> Iterator[tuple[Node, Affine, bool]]:
    """(tensor, the offset at which it is used, whether it is written) of every read and store; what
    a stage reads where it stores it is in registers."""
    stored = {(r.target, r.where) for r in stage.roots if r.kind == "store"}
    for root in stage.roots:
        for read in root.reads:
            if (read.node, read.coords) not in stored:
                yield read.node, offset(read.coords, read.node.room), False
        if root.kind == "store":
            yield root.target, offset(root.where, root.target.room), True


def kept_axes(region: RowRegion) -> list[Axis]:
    """Row axes that some column sum does not sum over, in row order."""
    kept: set[Axis] = set()
    for stage in region.stages:
        cols = stage.settled_cols()
        for root in stage.roots:
            if root.kind == "column":
                kept |= {a for a in root.axes if a not in root.reduced and a not in cols}
    order = region.group or region.stages[0].rows()
    return [a for a in order if a in kept]


def merged_rows(stage: Stage, fixed: Collection[Axis]) -> dict[Axis, Axis]:
    """Row axes that every tensor walks together with the next one, as one longer axis: an index
    less to divide for. Outer axis → the one that stands for both. fixed: axes left alone."""
    rows = [a for a in stage.rows() if a not in fixed]
    places = [at for _, at, _ in operands(stage)]
    merged: dict[Axis, Axis] = {}
    for outer, inner in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        last = merged.get(inner, inner)
        extent = product(a.extent for a in rows[rows.index(inner) : rows.index(last) + 1])
        if all(p.coefficient(outer) == as_dim(p.coefficient(last) * extent) for p in places):
            merged[outer] = last
    return merged
