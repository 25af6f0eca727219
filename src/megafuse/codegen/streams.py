"""How rows reach a stage's arithmetic: streams, rings, scalars, what stays, the row loop."""

from __future__ import annotations

from megafuse.codegen.address import Access, access, decompose
from megafuse.codegen.emitter import Emitter, indent
from megafuse.codegen.expr import CPP_TYPE
from megafuse.codegen.schedule import StageSchedule
from megafuse.codegen.shelf import Shelved, pinned_bytes, shelf_bytes
from megafuse.codegen.turning import COLUMN, FIRST, Turning
from megafuse.fusion.plan import Stage
from megafuse.fusion.rules.turn import Turned
from megafuse.fusion.walks import is_small, kept_axes, merged_rows
from megafuse.index import Affine, Axis, Coords, offset
from megafuse.ir import Node, product

COPY = 8
"""Bytes of a copy to shared memory from which on it pays: the machine makes narrow ones slowly."""


class RowStreams:
    """The tensors one stage reads along its rows, and the loop over the rows.

    prologue: before all rows; group_prologue: before the rows of each group; rings: bytes of shared
    memory (stages follow each other and share them).
    """

    def __init__(self, e: Emitter, k: int, stage: Stage, layout: StageSchedule) -> None:
        self.e, self.k, self.stage, self.layout = e, k, stage, layout
        self.cols = stage.settled_cols()
        self.col_set = set(self.cols)
        self.written_before = {n for s in e.region.stages[:k] for n in _targets(s)}
        self.prologue: list[str] = []
        self.group_prologue: list[str] = []
        tile = e.schedule.tile
        self.rings = shelf_bytes(e.schedule.shelf) + pinned_bytes(e.schedule.pinned)
        self.rings += tile.nbytes if tile is not None else 0
        self.fetches: list[str] = []
        self.ring_fetches: list[str] = []
        self.advances: list[str] = []
        self.cached = False  # whether parameters are read again for every row
        self.first: list[str] = []  # of a row's body: where on the shelf it lies
        self.turns: dict[str, str] = {}  # scalar → its fetch
        self.leaves: dict[tuple[Node, Coords], tuple[str, bool]] = {}
        self.tables: dict[tuple[str | None, int], str] = {}
        fixed = {*e.region.group, *kept_axes(e.region)}
        self.merged = merged_rows(stage, fixed)
        self.turning = Turning(self)

    # -- where things lie

    def access(self, where: Affine) -> Access:
        """How `where` is addressed, over the axes that are left."""
        left = Affine.make([t for t in where.terms if t[0] not in self.merged], where.const)
        return access(left, self.cols, self.layout.lanes, self.e.axis)

    def column(self, where: Access) -> str:
        """The offset of column `c`: a function, or a table of it where it takes a division."""
        capture = "&a" if where.symbolic_column else ""
        result = "i64" if where.symbolic_column else "int"
        text = f"[{capture}](int c) -> {result} {{ return {where.column or '0'}; }}"
        divides = "/" in text or "%" in text
        if self.layout.long or where.symbolic_column or not divides:
            return text
        key = where.column, where.run
        if key not in self.tables:
            self.tables[key] = name = f"table{self.k}_{len(self.tables)}"
            period = f", {where.period}" if where.period else ""
            self.prologue.append(f"const auto {name} = mf::table<C{self.k}, {where.run}{period}>("
                                 f"team, {text});")  # fmt: skip
        return self.tables[key]

    # -- how they are read

    def leaf(self, node: Node, coords: Coords) -> tuple[str, bool]:
        """(name, whether it varies along the row) of a buffer read as a stream or scalar."""
        key = (node, coords)
        if key in self.leaves:
            return self.leaves[key]
        e, k = self.e, self.k
        at = offset(coords, node.room)
        name = f"{node.name}_{k}{'abcdefghijklmnop'[sum(n is node for n, _ in self.leaves)]}"
        if self._from_shelf(name, node, at) or self._turned(name, node, at):
            self.leaves[key] = name, True
            return self.leaves[key]
        pointer = e.pointer(node)
        where = self.access(at)
        kind = CPP_TYPE[node.dtype]
        fresh = node in self.written_before
        still = self._stays(at, fresh)
        place = place_cpp(pointer, where)
        wide = where.column is not None
        column = self.column(where) if wide else ""
        flag = ", true" if fresh else ""
        cols = f"C{k}, {kind}, {where.run}"
        held = still is not None and e.schedule.hold
        if node in e.schedule.pinned and wide and where.kind == "run" and not held:
            self._pinned(name, node, where)
        elif still is not None and not wide:
            still.append(f"const mf::real {name} = mf::load({pointer}[{where.row}]);")
        elif still is not None:
            word = "hold" if where.kind == "run" else "hold_splat"
            if where.kind == "run" and (self.layout.long or not e.schedule.hold):
                word, self.cached = "long_hold", True
            still.append(f"const auto {name} = mf::{word}<{cols}{flag}>(team, {place}, {column});")
        elif self._ring(name, node, where, place):
            pass
        elif not wide:
            self.prologue.append(f"mf::Scalar<{kind}{flag}> {name};")
            self.turns[name] = f"{name}.fetch({place});"
        else:
            word = "stream" if where.kind == "run" else "splat"
            word = f"long_{word}" if self.layout.long or is_small(node) else word
            self.prologue.append(f"auto {name} = mf::{word}<{cols}{flag}>({column});")
            self.fetches.append(f"{name}.fetch(team, {place});")
            self.advances.append(f"{name}.advance();")
        self.leaves[key] = (name if wide or still is not None else f"{name}.value()", wide)
        return self.leaves[key]

    def _turned(self, name: str, node: Node, at: Affine) -> bool:
        """Read `node` as a row of the block's tile, if it is turned there."""
        byte = self.turning.place(Turned(node, at, False))
        if byte is None:
            return False
        self.prologue.append(f"auto {name} = mf::shelf<C{self.k}, {CPP_TYPE[node.dtype]}, "
                             f"{self.layout.lanes}>({COLUMN});")  # fmt: skip
        self.first.append(f"{name}.turn({byte});")
        return True

    # -- the shelf

    def shelved(self, node: Node) -> tuple[Shelved, int] | None:
        """The shelf's entry for a tensor, and the byte where it begins."""
        start = 0
        for item in self.e.schedule.shelf:
            if item.node is node:
                return item, start
            start += item.nbytes
        return None

    def on_shelf(self, item: Shelved, start: int, at: Affine) -> tuple[Access, str]:
        """How the element at offset `at` is addressed on the shelf, and the byte of the row."""
        where = self.access(item.place(at, self.e.region))
        row = f" + unsigned({where.row}) * {item.node.dtype.itemsize}" if where.row != "0" else ""
        return where, f"{start}{row}"

    def _from_shelf(self, name: str, node: Node, at: Affine) -> bool:
        """Read `node` from the shelf, if it is there; in its first stage, bring the row in too."""
        found = self.shelved(node)
        if found is None or not found[0].serves(self.k, at, self.e.region):
            return False
        item, start = found
        where, byte = self.on_shelf(item, start, at)
        self.prologue.append(f"auto {name} = mf::shelf<C{self.k}, {CPP_TYPE[node.dtype]}, "
                             f"{where.run}>({self.column(where)});")  # fmt: skip
        self.first.append(f"{name}.turn({byte});")
        if self.k == item.stage:
            place = place_cpp(self.e.pointer(node), self.access(at))
            self.ring_fetches.append(f"{name}.fetch(team, {place}, {byte});")
        return True

    def _pinned(self, name: str, node: Node, where: Access) -> None:
        """Read `node` where the whole of it lies as float32."""
        pinned = self.e.schedule.pinned
        start = shelf_bytes(self.e.schedule.shelf) + pinned_bytes(pinned[: pinned.index(node)])
        self.prologue.append(f"auto {name} = mf::pinned<C{self.k}, {where.run}, {start}>"
                             f"({self.column(where)});")  # fmt: skip
        if where.row != "0":
            self.first.append(f"{name}.turn(unsigned({where.row}) * 4);")

    def _ring(self, name: str, node: Node, where: Access, place: str) -> bool:
        """Stream through shared memory where the schedule says so and copies are wide enough."""
        schedule, layout = self.e.schedule, self.layout
        whole = where.column is not None and where.kind == "run"
        copied = where.run * node.dtype.itemsize
        if schedule.depth < 2 or layout.long or not whole or copied < COPY or is_small(node):
            return False
        self.prologue.append(
            f"auto {name} = mf::ring<C{self.k}, {CPP_TYPE[node.dtype]}, {where.run}, "
            f"{self.rings}, {schedule.threads}, {str(schedule.lazy).lower()}>"
            f"({self.column(where)});"
        )
        row = layout.steps * layout.lanes * node.dtype.itemsize * schedule.threads
        self.rings += schedule.slots * row
        self.ring_fetches.append(f"{name}.fetch(team, {place}, slot);")
        self.advances.append(f"{name}.advance(team, slot);")
        return True

    def _stays(self, at: Affine, fresh: bool) -> list[str] | None:
        """Where a tensor that all rows of a part, or of a group, read at the same place is fetched
        once; None when it is read elsewhere from row to row."""
        moving = at.axes - self.col_set - set(kept_axes(self.e.region))
        if not moving and not fresh:
            return self.prologue
        return self.group_prologue if moving <= set(self.e.region.group) else None

    @property
    def early(self) -> bool:
        """Whether copies of the next row start with this row. Reads that hit the nearest cache come
        back in order, behind copies on their way to memory, so without any; and where only one row
        is on its way, which needs all the time there is."""
        schedule = self.e.schedule
        alone = schedule.early and schedule.slots == 1 and not schedule.lazy
        return alone and not self.fetches and not self.cached

    # -- the row loop

    def loop(
        self, begin: str, end: str, step: str, rows: list[Axis], lines: list[str]
    ) -> list[str]:
        """The rows begin, begin + step, ... below end, each worked on by `lines`."""
        e = self.e
        left = [a for a in rows if a not in self.merged]
        names = [e.axis(a) for a in left]
        row = f"Row{self.k}"
        fields = f"int {', '.join(names)};" if names else "char none;"
        extents = [product(a.extent for a in rows if self.merged.get(a, a) is b) for b in left]
        values = ", ".join(decompose("r", extents, narrow=True)) if names else "0"
        first = f"{FIRST} + " if e.schedule.tile is not None else ""
        unpack = [f"const i64 {n} = {first}q.{n};" for n in names]
        lines = [*self.first, *lines]
        used = "\n".join(lines)
        unpack_body = [f"const i64 {n} = {first}row.{n};" for n in names if f"{n}" in used]
        ring = bool(self.ring_fetches)
        k = self.k
        lambdas = [f"const auto fetch{k} = [&](const {row}& q) {{", *indent(unpack),
                   *indent(self.fetches), "};"]  # fmt: skip
        if ring:
            lambdas += [f"const auto fetch_ring{k} = [&](const {row}& q, int slot) {{",
                        *indent(unpack), *indent(self.ring_fetches), "};"]  # fmt: skip
        # 32 bits, which `launch` sees to: every row works out where it lies.
        begin, end, step = (x if x.isdecimal() else f"int({x})" for x in (begin, end, step))
        turns, advances = self._turns(f"{begin}, {end}, {step}", row, unpack)
        word = "rows" if e.schedule.ahead else "rows_now"
        if ring:
            word = f"rows_ring<{e.schedule.depth - 1}, {e.schedule.slots}>"
        also, slot = (f", fetch_ring{k}", "(int slot)") if ring else ("", "")
        return [
            f"struct {row} {{ {fields} }};",
            f"const auto row_of{k} = [&](int r) {{ return {row}{{{values}}}; }};",
            *lambdas, *turns,
            f"const auto advance{k} = [&]{slot} {{ {' '.join(advances)} }};",
            f"mf::{word}({begin}, {end}, {step}, row_of{k}, fetch{k}{also}, advance{k}, "
            f"[&](const {row}& row{', const auto& copies' if ring else ''}) {{",
            *indent(unpack_body), *indent(lines),
            "});",
        ]  # fmt: skip

    def _turns(self, rows: str, row: str, unpack: list[str]) -> tuple[list[str], list[str]]:
        """Lines before the loop, and what advance() does, with the scalars of the rows."""
        if not self.turns:
            return [], self.advances
        k = self.k
        again = f"turns{k}.fetch(team, row_of{k}, scalars{k});"
        over = " ".join([*(f"{name}.turn();" for name in self.turns), again])
        before = [f"const auto scalars{k} = [&](const {row}& q) {{", *indent(unpack),
                  *indent(list(self.turns.values())), "};",
                  f"mf::Turns<Team, int> turns{k}({rows});", again]  # fmt: skip
        picks = [f"{name}.pick(team, turns{k}.lane);" for name in self.turns]
        return before, [*self.advances, f"if (turns{k}.over()) {{ {over} }}", *picks]


def _targets(stage: Stage) -> set[Node]:
    return {r.target for r in stage.roots if r.kind != "row"}


def place_cpp(pointer: str, where: Access) -> str:
    """The first element of a row."""
    return pointer if where.row == "0" else f"{pointer} + {where.row}"
