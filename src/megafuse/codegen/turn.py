"""How many rows a block turns at once in shared memory, and how they lie there.

A block walks tiles: `rows` values of one row axis by all columns. What a stage uses across its rows
(fusion/rules/turn.py) is brought in or taken out along its own contiguous axis, a tile at a time,
and lies in shared memory as rows meanwhile: a *sheet*. See tile/turn.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megafuse.fusion import cost
from megafuse.fusion.plan import RowRegion
from megafuse.fusion.rules.turn import Turn, Turned
from megafuse.index import Axis, content
from megafuse.ir import Dim, evaluate, product

BANKS = 128
"""Bytes that the banks of shared memory serve at once."""
LINE = 128
"""Bytes of a column's rows that one tile takes at most: a cache line."""
LEAST = 16
"""Bytes of a column's rows from which on turning pays."""
ROOM = 227 * 1024 - 2048
"""Bytes of shared memory of a multiprocessor, less what reductions exchange."""
CROWD = {1: 1.4, 2: 1.15, 3: 1.05}
"""Factor on the time where only so many blocks share a multiprocessor: one loads while others
compute and store."""


@dataclass(frozen=True)
class Sheet:
    """A tile of one tensor. width: rows that one access to memory takes."""

    use: Turned
    rows: int
    columns: int
    width: int

    @property
    def pitch(self) -> int:
        """Bytes from row to row: `width` rows are whole passes over the banks."""
        step = max(16, BANKS // self.width)
        return -(-self.columns * self.use.node.dtype.itemsize // step) * step

    @property
    def skew(self) -> int:
        """Bytes by which each `width` rows begin later: the accesses to one column's rows then
        fall into as many different banks as there are."""
        return max(16, BANKS // (self.rows // self.width) // 16 * 16)

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch + self.rows // self.width * self.skew


@dataclass(frozen=True)
class Tile:
    """`rows` of the `extent` values of `axis` at a time."""

    axis: Axis
    extent: Dim
    rows: int
    sheets: tuple[Sheet, ...]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.sheets)

    @property
    def blocks(self) -> int:
        """How many a multiprocessor has room for."""
        return ROOM // (self.nbytes + 1024)

    def find(self, use: Turned) -> tuple[int, int] | None:
        """(its number, the byte where it begins) of a sheet."""
        start = 0
        for number, sheet in enumerate(self.sheets):
            if sheet.use == use:
                return number, start
            start += sheet.nbytes
        return None

    def count(self, region: RowRegion, sizes: Mapping[str, int]) -> int:
        """Tiles of all rows."""
        rows = evaluate(product(a.extent for a in region.stages[0].rows()), sizes)
        extent = evaluate(self.extent, sizes)
        return 0 if extent == 0 else rows // extent * -(-extent // self.rows)


def tile_for(region: RowRegion) -> Tile | None:
    """The tile that costs least; None where nothing is worth turning, or no tile has room."""
    turn = cost.turned(region)
    if turn is None:
        return None
    columns = region.stages[0].columns()
    assert isinstance(columns, int)
    narrowest = min(u.node.dtype.itemsize for u in turn.uses)
    step = max(_width(u, turn) for u in turn.uses)
    most = LINE // narrowest
    if isinstance(turn.extent, int):
        most = min(most, -(-turn.extent // step) * step)
    tiles = [_tile(turn, rows, columns) for rows in range(step, most + 1, step)]
    fit = [t for t in tiles if t.blocks and t.rows * narrowest >= LEAST]
    return min(fit, key=lambda t: _price(t, turn), default=None)


def _width(use: Turned, turn: Turn) -> int:
    return math.gcd(16 // use.node.dtype.itemsize, turn.aligned(use), content(turn.extent))


def _tile(turn: Turn, rows: int, columns: int) -> Tile:
    sheets = tuple(Sheet(u, rows, columns, _width(u, turn)) for u in turn.uses)
    return Tile(turn.axis, turn.extent, rows, sheets)


def _price(tile: Tile, turn: Turn) -> tuple[float, int]:
    """What a byte costs in this tile, roughly: rows past the end, sectors that two tiles share (out
    of the second-level cache, so a fraction of the price), requests that touch many lines, few
    blocks to hide each other's waits."""
    price = 1.0
    for s in tile.sheets:
        size = s.use.node.dtype.itemsize
        run = tile.rows * size
        start = math.gcd(turn.aligned(s.use) * size, run)
        twice = cost.sectors(run, start) * cost.SECTOR / run - 1
        price = max(price, 1 + 0.3 * twice + 0.1 * (LINE / run - 1))
    if isinstance(tile.extent, int):
        price *= -(-tile.extent // tile.rows) * tile.rows / tile.extent
    return price * CROWD.get(tile.blocks, 1.0), -tile.rows
