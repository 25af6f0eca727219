"""One stage of a row region as tile C++: its streams, its phases and its loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megafuse.codegen.address import Access, access, decompose
from megafuse.codegen.expr import CPP_TYPE, pointwise_cpp, rounded, scalar_cpp
from megafuse.codegen.schedule import Schedule, StageSchedule, is_small
from megafuse.fusion.plan import Root, RowRegion, Stage
from megafuse.fusion.roots import resolve
from megafuse.fusion.rules.same_rows import produced
from megafuse.index import Affine, Axis, Coords, offset, operand_coords
from megafuse.ir import Node, as_dim, product
from megafuse.ops import is_reduction, pointwise


KEPT = 4
"""Instructions an element from which on keeping a value pays for the register it takes."""


COPY = 8
"""Bytes of a copy to shared memory from which on it pays: the machine makes narrow ones slowly."""


@dataclass(frozen=True)
class Arg:
    """One 8-byte member of a kernel's Args: kind "buffer" (of `node`), "partial" (column sum
    number `index`), "size" (run-time size `name`), or "parts", "chunks", "span" of the launch."""

    kind: str
    name: str
    node: Node | None = None
    index: int = 0


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


@dataclass
class Emitter:
    """State shared by the stages of one region."""

    region: RowRegion
    buffers: set[Node]
    schedule: Schedule
    rounding: bool
    fast: bool = False
    args: dict[tuple[str, object], Arg] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    axis_names: dict[Axis, str] = field(default_factory=dict)
    partials: list[int] = field(default_factory=list)
    sums: list[tuple[Root, Stage, str]] = field(default_factory=list)

    def pointer(self, node: Node, write: bool = False) -> str:
        key = ("buffer", node)
        if key not in self.args:
            written = node in self.region.writes()
            const = "" if written else "const "
            self.args[key] = Arg("buffer", node.name, node)
            self.members.append(f"{const}{CPP_TYPE[node.dtype]}* {node.name};  // {node.type}")
        return f"a.{node.name}"

    def partial(self, columns: int) -> str:
        index = len(self.partials)
        self.partials.append(columns)
        self.args["partial", index] = Arg("partial", f"part{index}", None, index)
        self.members.append(f"float* part{index};")
        return f"a.part{index}"

    def axis(self, axis: Axis) -> str:
        if axis not in self.axis_names:
            stem = "g" if axis in self.region.group else "r"
            self.axis_names[axis] = f"{stem}{len(self.axis_names)}"
        return self.axis_names[axis]


def indent(lines: Sequence[str], by: int = 2) -> list[str]:
    return [" " * by + line for line in lines]


class StageEmitter:
    """One stage: streams, phases and stores."""

    def __init__(self, e: Emitter, k: int, stage: Stage, layout: StageSchedule) -> None:
        self.e, self.k, self.stage, self.layout = e, k, stage, layout
        self.cols = stage.settled_cols()
        self.col_set = set(self.cols)
        self.made = produced(stage)
        self.written_before = {n for s in e.region.stages[:k] for n in _targets(s)}
        self.prologue: list[str] = []  # before all rows: streams, held parameters, sums
        self.group_prologue: list[str] = []  # before the rows of each group
        self.epilogue: list[str] = []
        self.turns: dict[str, str] = {}  # scalar → its fetch
        self.fetches: list[str] = []
        self.ring_fetches: list[str] = []
        self.rings = 0  # bytes of this stage's rings; stages follow each other and share them
        self.advances: list[str] = []
        self.leaves: dict[tuple[Node, Coords], tuple[str, bool]] = {}
        self.scalars: dict[tuple[Node, Coords], str] = {}
        self.phases: dict[tuple[Node, Coords], int] = {}
        self.keeps: dict[tuple[Node, Coords], str] = {}
        self.kept_done: set[tuple[Node, Coords]] = set()
        self.tables: dict[tuple[str | None, int], str] = {}
        self.counter = 0
        self.merged = self._merged_rows()

    # -- places and phases

    def _merged_rows(self) -> dict[Axis, Axis]:
        """Row axes that every tensor walks together with the next one, as one longer axis: an
        index less to divide for. Outer axis → the one that stands for both."""
        fixed = {*self.e.region.group, *kept_axes(self.e.region)}
        rows = [a for a in self.stage.rows() if a not in fixed]
        places = [offset(read.coords, read.node.shape) for r in self.stage.roots for read in r.reads]
        places += [offset(r.where, r.target.shape) for r in self.stage.roots if r.kind == "store"]
        merged: dict[Axis, Axis] = {}
        for outer, inner in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
            last = merged.get(inner, inner)
            extent = product(a.extent for a in rows[rows.index(inner) : rows.index(last) + 1])
            if all(p.coefficient(outer) == as_dim(p.coefficient(last) * extent) for p in places):
                merged[outer] = last
        return merged

    def _access(self, where: Affine) -> Access:
        """How `where` is addressed, over the axes that are left."""
        left = Affine.make([t for t in where.terms if t[0] not in self.merged], where.const)
        return access(left, self.cols, self.layout.lanes, self.e.axis)

    def settle(self, node: Node, coords: Coords, expand: bool = False) -> tuple[Node, Coords, str]:
        """(node, coords, what it is there): "leaf", "reduction", "compute" or "const"."""
        buffers, start = self.e.buffers, node
        node, coords = resolve(node, coords, buffers - {node} if expand else buffers)
        expand = expand and node is start
        if is_reduction(node) and node in self.made and self.made[node].kind == "row" \
                and self.made[node].out() == coords:  # fmt: skip
            return node, coords, "reduction"
        own_store = any(r.node is node and r.target is node and r.kind == "store"
                        and r.where == coords for r in self.stage.roots)  # fmt: skip
        if node in buffers and not expand and not (own_store and not is_reduction(node)):
            return node, coords, "leaf"
        if node.op == "cast" and self._spell(node, ["x"]) == "x":  # a type that registers know not
            return self.settle(node.inputs[0], operand_coords(node, node.inputs[0], coords))
        return node, coords, "const" if node.op == "full" else "compute"

    def _spell(self, node: Node, args: list[str]) -> str:
        rounding = self.e.rounding or bool(node.attrs.get("written"))
        return pointwise_cpp(node, args, rounding, self.e.fast)

    def phase(self, node: Node, coords: Coords, expand: bool = False) -> int:
        node, coords, what = self.settle(node, coords, expand)
        if what in ("leaf", "const"):
            return 0
        if (node, coords) not in self.phases:
            if what == "reduction":
                root = next(r for r in self.stage.roots if r.node is node and r.kind == "row")
                self.phases[node, coords] = self.root_phase(root) + 1
            else:
                self.phases[node, coords] = max(
                    (self.phase(i, operand_coords(node, i, coords)) for i in node.inputs), default=0
                )
        return self.phases[node, coords]

    def root_phase(self, root: Root) -> int:
        if root.kind == "store":
            return self.phase(root.node, root.at, root.target is root.node)
        return self.phase(root.node.inputs[0], root.at)

    def wide(self, node: Node, coords: Coords, expand: bool = False) -> bool:
        """Whether the value differs from column to column."""
        return any(c.axes & self.col_set for c in coords)

    # -- the program of one row

    def program(self) -> list[str]:
        roots = self.stage.roots
        last = max(self.root_phase(r) for r in roots)
        by_phase = [[r for r in roots if self.root_phase(r) == p] for p in range(last + 1)]
        self._plan_keeps(by_phase)
        lines: list[str] = []
        for p, mine in enumerate(by_phase):
            before: list[str] = []
            loop: list[str] = []
            memo: dict[tuple[Node, Coords], str] = {}
            sums: list[tuple[Root, str]] = []
            for root in mine:
                self._root(root, before, loop, memo, sums)
            for root, accumulator in sums:
                word = {"sum": "Sum", "amax": "Max", "amin": "Min"}[root.node.op]
                before.append(f"mf::{word}<C{self.k}> {accumulator};")
            lines += before
            if loop:
                word = "MF_LOOP" if self.layout.long else "MF_STEPS"
                lines += [f"{word}(j, C{self.k}) {{", *indent(loop), "}"]
            if p == 0 and self.ring_fetches:
                lines.append("copies();")
            lines += self._combine(sums, p)
        return lines

    def _combine(self, sums: list[tuple[Root, str]], p: int) -> list[str]:
        lines: list[str] = []
        for op, word in (("sum", "sum"), ("amax", "max"), ("amin", "min")):
            mine = [(r, a) for r, a in sums if r.node.op == op]
            if not mine:
                continue
            pack = f"{word}s{self.k}_{p}"
            lines.append(f"const auto {pack} = team.{word}({', '.join(a for _, a in mine)});")
            for i, (root, _) in enumerate(mine):
                name = f"{root.node.name}_"
                value = f"{pack}[{i}]"
                if self.e.rounding:
                    value = rounded(value, root.node.dtype)
                lines.append(f"const mf::real {name} = {value};  // {root.node.origin}")
                self.scalars[root.node, root.out()] = name
        return lines

    def _root(self, root: Root, before: list[str], loop: list[str],
              memo: dict[tuple[Node, Coords], str], sums: list[tuple[Root, str]]
              ) -> None:  # fmt: skip
        if root.kind == "store":
            wide = bool(root.axes & self.col_set)
            value = self.value(root.node, root.at, before, loop, memo, root.target is root.node)
            pointer = self.e.pointer(root.target, write=True)
            where = self._access(offset(root.where, root.target.shape))
            place = _place(pointer, where)
            comment = f"  // {root.node.origin}"
            if wide:
                kind = CPP_TYPE[root.target.dtype]
                loop.append(f"mf::store<C{self.k}, {kind}, {where.run}>(team, j, {place}, "
                            f"{self._column(where)}, {value});{comment}")  # fmt: skip
            else:
                before.append(f"team.store({place}, {value});{comment}")
        elif root.kind == "row":
            value = self.value(root.node.inputs[0], root.at, before, loop, memo)
            accumulator = f"{root.node.name}_acc"
            loop.append(f"{accumulator}.add(team, j, {value});  // {root.node.origin}")
            sums.append((root, accumulator))
        else:
            value = self.value(root.node.inputs[0], root.at, before, loop, memo)
            pointer = self.e.partial(self.layout.columns)
            name = f"{root.node.name}_col"
            kind = f"mf::{'LongColumn' if self.layout.long else 'Column'}<C{self.k}>"
            self.prologue.append(f"{kind} {name}(team, {pointer});  // {root.node.origin}")
            self.epilogue.append(f"{name}.write(team);")
            loop.append(f"{name}.add(team, j, {value});  // {root.node.origin}")
            self.e.sums.append((root, self.stage, pointer))

    # -- values

    def value(self, node: Node, coords: Coords, before: list[str], loop: list[str],
              memo: dict[tuple[Node, Coords], str], expand: bool = False) -> str:  # fmt: skip
        """C++ name of `node` at `coords`; emits what it takes, row scalars into `before`."""
        node, coords, what = self.settle(node, coords, expand)
        key = (node, coords)
        if key in self.scalars:
            return self.scalars[key]
        if key in memo:
            return memo[key]
        if what == "const":
            return scalar_cpp(node.attrs["value"])
        if what == "leaf":
            name, wide = self._leaf(node, coords)
            if not wide:
                return name
            memo[key] = self._name(f"{name}.at(team, j)", node, loop)
            return memo[key]
        if key in self.keeps and key in self.kept_done:
            memo[key] = self._name(f"{self.keeps[key]}.at(j)", node, loop)
            return memo[key]
        args = [
            self.value(a, operand_coords(node, a, coords), before, loop, memo)
            if isinstance(a, Node) else scalar_cpp(a)
            for a in node.args
        ]  # fmt: skip
        text = self._spell(node, args)
        if text == args[0]:
            return text
        wide = self.wide(node, coords) and any(self._is_wide(a, node, coords) for a in node.inputs)
        if not wide:
            name = f"{node.name}_{len(self.scalars)}"
            before.append(f"const mf::real {name} = {text};  // {node.origin}")
            self.scalars[key] = name
            return name
        memo[key] = name = self._name(text, node, loop)
        if key in self.keeps:
            loop.append(f"{self.keeps[key]}.put(j, {name});")
            self.kept_done.add(key)
        return name

    def _is_wide(self, node: Node, user: Node, coords: Coords) -> bool:
        node, coords, what = self.settle(node, operand_coords(user, node, coords))
        if what == "leaf":
            return any(c.axes & self.col_set for c in coords)
        if what in ("reduction", "const"):
            return False
        return any(self._is_wide(i, node, coords) for i in node.inputs)

    def _name(self, text: str, node: Node, loop: list[str]) -> str:
        self.counter += 1
        name = f"v{self.counter}"
        loop.append(f"const auto {name} = {text};  // {node.name}: {node.origin}")
        return name

    def _leaf(self, node: Node, coords: Coords) -> tuple[str, bool]:
        """(name, whether it varies along the row) of a buffer read as a stream or scalar."""
        key = (node, coords)
        if key in self.leaves:
            return self.leaves[key]
        e, k = self.e, self.k
        pointer = e.pointer(node)
        where = self._access(offset(coords, node.shape))
        kind = CPP_TYPE[node.dtype]
        name = f"{node.name}_{k}{'abcdefghijklmnop'[sum(n is node for n, _ in self.leaves)]}"
        fresh = node in self.written_before
        at = offset(coords, node.shape)
        still = self._stays(at, fresh)
        place = _place(pointer, where)
        wide = where.column is not None
        column = self._column(where) if wide else ""
        flag = ", true" if fresh else ""
        cols = f"C{k}, {kind}, {where.run}"
        if still is not None and not wide:
            still.append(f"const mf::real {name} = mf::load({pointer}[{where.row}]);")
        elif still is not None:
            word = "hold" if where.kind == "run" else "hold_splat"
            if where.kind == "run" and (self.layout.long or not e.schedule.hold):
                word = "long_hold"
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

    def _column(self, where: Access) -> str:
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
            self.prologue.append(f"const auto {name} = mf::table<C{self.k}, {where.run}>(team, "
                                 f"{text});")  # fmt: skip
        return self.tables[key]

    def _ring(self, name: str, node: Node, where: Access, place: str) -> bool:
        """Stream through shared memory where the schedule says so and copies are wide enough."""
        schedule, layout = self.e.schedule, self.layout
        whole = where.column is not None and where.kind == "run"
        copied = where.run * node.dtype.itemsize
        if schedule.depth < 2 or layout.long or not whole or copied < COPY or is_small(node):
            return False
        self.prologue.append(
            f"auto {name} = mf::ring<C{self.k}, {CPP_TYPE[node.dtype]}, {where.run}, "
            f"{schedule.depth}, {self.rings}, {schedule.threads}, {str(schedule.lazy).lower()}>"
            f"({self._column(where)});"
        )
        row = layout.steps * layout.lanes * node.dtype.itemsize * schedule.threads
        self.rings += schedule.depth * row
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

    def _plan_keeps(self, by_phase: list[list[Root]]) -> None:
        """Values that a later phase finds in registers: expensive ones, and with `schedule.keep`
        those it starts from and would need several instructions for."""
        if self.layout.long:
            return
        needed: dict[tuple[Node, Coords], list[int]] = {}
        starts: dict[tuple[Node, Coords], None] = {}  # wanted by something that is new in a phase

        def visit(node: Node, coords: Coords, p: int, new: bool, expand: bool = False) -> None:
            node, coords, what = self.settle(node, coords, expand)
            if what != "compute":
                return
            phases = needed.setdefault((node, coords), [])
            if phases and phases[0] < p and new:
                starts[node, coords] = None
            if p in phases:
                return
            phases.append(p)
            for i in node.inputs:
                visit(i, operand_coords(node, i, coords), p, phases[0] == p)

        for p, roots in enumerate(by_phase):
            for root in roots:
                if root.kind == "store":
                    visit(root.node, root.at, p, True, root.target is root.node)
                else:
                    visit(root.node.inputs[0], root.at, p, True)
        for (node, coords), phases in needed.items():
            entry = pointwise.TABLE.get(node.op)
            costly = entry is not None and entry.expensive
            if self.e.schedule.keep and not costly and (node, coords) in starts:
                costly = self._price(node, coords, set()) >= KEPT
            if len(phases) > 1 and costly and self.wide(node, coords):
                self.keeps[node, coords] = f"keep{self.k}_{len(self.keeps)}"

    def _price(self, node: Node, coords: Coords, seen: set[tuple[Node, Coords]]) -> int:
        """Instructions an element of this value takes, given what is kept already."""
        node, coords, what = self.settle(node, coords)
        key = (node, coords)
        if key in seen or key in self.keeps or what in ("const", "reduction") or \
                not any(c.axes & self.col_set for c in coords):  # fmt: skip
            return 0
        seen.add(key)
        inputs = () if what == "leaf" else node.inputs
        return 1 + sum(self._price(i, operand_coords(node, i, coords), seen) for i in inputs)

    # -- the row loop

    def loop(
        self, begin: str, end: str, step: str, rows: list[Axis], lines: list[str]
    ) -> list[str]:
        e = self.e
        left = [a for a in rows if a not in self.merged]
        names = [e.axis(a) for a in left]
        row = f"Row{self.k}"
        fields = f"int {', '.join(names)};" if names else "char none;"
        extents = [product(a.extent for a in rows if self.merged.get(a, a) is b) for b in left]
        values = ", ".join(decompose("r", extents, narrow=True)) if names else "0"
        unpack = [f"const i64 {n} = q.{n};" for n in names]
        used = "\n".join(lines)
        unpack_body = [f"const i64 {n} = row.{n};" for n in names if f"{n}" in used]
        keeps = [f"mf::Keep<C{self.k}> {name};" for name in self.keeps.values()]
        ring = bool(self.ring_fetches)
        k = self.k
        lambdas = [f"const auto fetch{k} = [&](const {row}& q) {{", *indent(unpack),
                   *indent(self.fetches), "};"]  # fmt: skip
        if ring:
            lambdas += [f"const auto fetch_ring{k} = [&](const {row}& q, int slot) {{", *indent(unpack),
                        *indent(self.ring_fetches), "};"]  # fmt: skip
        turns, advances = self._turns(f"{begin}, {end}, {step}", row, unpack)
        word = "rows" if e.schedule.ahead else "rows_now"
        if ring:
            word = f"rows_ring<{e.schedule.depth}>"
        also, slot = (f", fetch_ring{k}", "(int slot)") if ring else ("", "")
        return [
            f"struct {row} {{ {fields} }};",
            f"const auto row_of{k} = [&](int r) {{ return {row}{{{values}}}; }};",
            *lambdas, *turns,
            f"const auto advance{k} = [&]{slot} {{ {' '.join(advances)} }};",
            f"mf::{word}({begin}, {end}, {step}, row_of{k}, fetch{k}{also}, advance{k}, "
            f"[&](const {row}& row{', const auto& copies' if ring else ''}) {{",
            *indent(unpack_body), *indent(keeps), *indent(lines),
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
                  f"mf::Turns<Team> turns{k}({rows});", again]  # fmt: skip
        picks = [f"{name}.pick(team, turns{k}.lane);" for name in self.turns]
        return before, [*self.advances, f"if (turns{k}.over()) {{ {over} }}", *picks]


def _targets(stage: Stage) -> set[Node]:
    return {r.target for r in stage.roots if r.kind != "row"}


def _place(pointer: str, where: Access) -> str:
    return pointer if where.row == "0" else f"{pointer} + {where.row}"
