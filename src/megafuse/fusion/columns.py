"""Long rows for pointwise stages: neighbouring dimensions that every tensor walks as one."""

from __future__ import annotations

from megafuse.fusion.plan import RowRegion, Stage
from megafuse.index import Axis, offset
from megafuse.ir import as_dim, product

ENOUGH = 512
"""Columns of a row that keep a warp busy: no more are looked for."""
MOST = 4_096
"""Columns a row may get: more rows than that are worth more than longer ones."""


def widen(region: RowRegion) -> None:
    """Gives pointwise stages longer rows: the pixels of an image instead of one line of it, say.

    A stage that reduces no row may call any dimensions its columns. Where each tensor that it reads
    or writes lies contiguously over two of them, or is the same over both, they become one.
    """
    for stage in region.stages:
        if any(r.kind == "row" for r in stage.roots):
            continue
        cols = list(stage.settled_cols())
        while cols and (outer := _outer(stage, cols, region.group)) is not None:
            cols.insert(0, outer)
        stage.cols = cols


def _outer(stage: Stage, cols: list[Axis], group: list[Axis]) -> Axis | None:
    """A row axis that continues the columns outwards in every tensor."""
    inner, extent = cols[0], product(a.extent for a in cols)
    assert isinstance(extent, int)
    if extent >= ENOUGH:
        return None
    places = [offset(read.coords, read.node.room) for r in stage.roots for read in r.reads]
    places += [offset(r.where, r.target.room) for r in stage.roots if r.kind == "store"]
    for axis in stage.axes:
        if axis in cols or axis in group or not isinstance(axis.extent, int):
            continue
        if extent * axis.extent > MOST:
            continue
        sums = [r for r in stage.roots if r.kind == "column"]
        if any(axis in r.reduced or axis not in r.axes for r in sums):
            continue
        if all(p.coefficient(axis) == as_dim(p.coefficient(inner) * inner.extent) for p in places):
            return axis
    return None

