"""Tiles of rows as tile C++: what is turned in, the rows themselves, what is turned out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megafuse.codegen.address import decompose, dim_cpp
from megafuse.codegen.emitter import indent
from megafuse.codegen.expr import CPP_TYPE
from megafuse.fusion.rules.turn import Turned
from megafuse.index import Axis
from megafuse.ir import product

if TYPE_CHECKING:
    from megafuse.codegen.streams import RowStreams

FIRST = "first_row"
"""The tile's first value of its axis."""
COLUMN = "[](int c) -> int { return c; }"
"""Where a column lies in a row of a sheet."""


class Turning:
    """The sheets of one stage as they come into use. ins, outs: lines around the rows of a tile."""

    def __init__(self, streams: RowStreams) -> None:
        self.streams = streams
        self.tile = streams.e.schedule.tile
        self.ins: list[str] = []
        self.outs: list[str] = []
        self.known: set[int] = set()

    def place(self, use: Turned) -> str | None:
        """The byte of shared memory at which a row of `use` begins; None where it is not turned."""
        found = self.tile.find(use) if self.tile is not None else None
        if self.tile is None or found is None:
            return None
        number, start = found
        name = f"S{self.streams.k}_{number}"
        if number not in self.known:
            self.known.add(number)
            self._walk(use, number, start, name)
        return f"{start} + {name}::place(row.{self.streams.e.axis(self.tile.axis)})"

    def _walk(self, use: Turned, number: int, start: int, name: str) -> None:
        streams, tile = self.streams, self.tile
        assert tile is not None
        s = tile.sheets[number]
        streams.prologue.append(
            f"using {name} = mf::Sheet<{CPP_TYPE[use.node.dtype]}, {s.columns}, {s.rows}, "
            f"{s.width}, {s.pitch}, {s.skew}>;"
        )
        where = streams.access(use.at)
        pointer = streams.e.pointer(use.node, write=use.made)
        row = "" if where.row == "0" else f" + {where.row}"
        capture, result = ("&a", "i64") if where.symbolic_column else ("", "int")
        column = f"[{capture}](int c) -> {result} {{ return {where.column}; }}"
        word, lines = ("turn_out", self.outs) if use.made else ("turn_in", self.ins)
        lines.append(f"mf::{word}<{name}>(team, {pointer}{row}, {column}, tile_rows, {start});")

    def loop(self, rest: Sequence[Axis], lines: list[str]) -> list[str]:
        """Every tile of the rows over `rest`, each row worked on by `lines`."""
        streams, tile = self.streams, self.tile
        assert tile is not None
        e, merged = streams.e, streams.merged
        outer = [a for a in rest if a not in merged and a is not tile.axis]
        extents = [product(a.extent for a in rest if merged.get(a, a) is b) for b in outer]
        parts = zip(outer, decompose("(g / tiles)", extents), strict=True)
        places = [f"const i64 {e.axis(axis)} = {text};" for axis, text in parts]
        rows = streams.loop("team.index()", "tile_rows", str(e.schedule.teams), [tile.axis], lines)
        return [
            f"const i64 across = {dim_cpp(tile.extent)};",
            f"const i64 tiles = (across + {tile.rows - 1}) / {tile.rows};",
            f"const i64 begin = chunk, end = {dim_cpp(product(extents))} * tiles;",
            "for (i64 g = begin; g < end; g += a.chunks) {",
            *indent([
                *places,
                f"const i64 {FIRST} = g % tiles * {tile.rows}, {e.axis(tile.axis)} = {FIRST};",
                f"const int tile_rows = int(mf::min_i64({tile.rows}, across - {FIRST}));",
                *self.ins, "team.block_sync();",
                *rows, "team.block_sync();",
                *self.outs,
            ]),
            "}",
        ]  # fmt: skip
