"""Tensors that a stage uses across its rows, and the axis they are contiguous over.

A row of such a tensor has its elements a stride apart, while its neighbours in memory belong to
the next rows: a warp's request then touches a sector for every element or two. A block that owns
several consecutive rows may take the tensor along its own contiguous axis, and turn it in shared
memory. That is legal where the rows of a stage depend on nothing but themselves, where no sum over
rows keeps the axis, so that a block may own any of its values, and where elements have 2 or 4
bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafuse.fusion.plan import RowRegion, Stage
from megafuse.fusion.walks import kept_axes, merged_rows, operands
from megafuse.index import Affine, Axis, content
from megafuse.ir import Dim, Node, product

SIZES = (2, 4)
"""Bytes of an element that can be turned."""


@dataclass(frozen=True)
class Turned:
    """One use of a tensor across the rows, at offset `at`; made: it is written there."""

    node: Node
    at: Affine
    made: bool


@dataclass(frozen=True)
class Turn:
    """axis: the row axis that the tensors `uses` are contiguous over; it stands for row axes merged
    into it, and has `extent` values with them. merged: all axes that others stand for."""

    axis: Axis
    extent: Dim
    uses: tuple[Turned, ...]
    merged: frozenset[Axis] = frozenset()

    def aligned(self, use: Turned) -> int:
        """Elements that the first row of every column is a multiple of (0: of any number)."""
        apart = (c for a, c in use.at.terms if a is not self.axis and a not in self.merged)
        return math.gcd(content(use.at.const), *map(content, apart))


def turns(region: RowRegion) -> list[Turn]:
    """Every axis over which tensors could be turned."""
    if region.kind == "group":
        return []
    (stage,) = region.stages
    kept = kept_axes(region)
    merged = merged_rows(stage, kept)
    found = []
    for axis in stage.rows():
        if axis in kept or axis in merged or axis.extent == 1:
            continue
        uses = dict.fromkeys(
            Turned(*o) for o in operands(stage) if _across(o[0], o[1], stage, axis)
        )
        if uses:
            extent = product(a.extent for a in stage.rows() if merged.get(a, a) is axis)
            found.append(Turn(axis, extent, tuple(uses), frozenset(merged)))
    return found


def strided(at: Affine, stage: Stage) -> bool:
    """Whether neighbouring columns lie apart."""
    cols = [a for a in stage.settled_cols() if a.extent != 1]
    return bool(cols) and at.coefficient(cols[-1]) not in (0, 1)


def _across(node: Node, at: Affine, stage: Stage, axis: Axis) -> bool:
    sized = node.dtype.itemsize in SIZES
    return sized and at.coefficient(axis) == 1 and strided(at, stage)
