"""One stage of a row region as tile C++: its streams, its phases and its loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megafuse.codegen.address import Access, access, decompose
from megafuse.codegen.expr import CPP_TYPE, pointwise_cpp, rounded, scalar_cpp
from megafuse.codegen.schedule import Schedule, StageSchedule
from megafuse.fusion.plan import Root, RowRegion, Stage
from megafuse.fusion.roots import resolve
from megafuse.fusion.rules.same_rows import produced
from megafuse.index import Affine, Axis, Coords, offset, operand_coords
from megafuse.ir import Node
from megafuse.ops import is_reduction, pointwise


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
        self.epilogue: list[str] = []
        self.fetches: list[str] = []
        self.ring_fetches: list[str] = []
        self.shared = 0  # bytes of this stage's rings; stages follow each other and share them
        self.advances: list[str] = []
        self.leaves: dict[tuple[Node, Coords], tuple[str, bool]] = {}
        self.scalars: dict[tuple[Node, Coords], str] = {}
        self.phases: dict[tuple[Node, Coords], int] = {}
        self.keeps: dict[tuple[Node, Coords], str] = {}
        self.kept_done: set[tuple[Node, Coords]] = set()
        self.column_names: dict[int, str] = {}
        self.counter = 0

    # -- places and phases

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
        return node, coords, "const" if node.op == "full" else "compute"

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
            where = access(offset(root.where, root.target.shape), self.cols, self.layout.lanes,
                           self.e.axis)  # fmt: skip
            place = _place(pointer, where)
            comment = f"  // {root.node.origin}"
            if wide:
                kind = CPP_TYPE[root.target.dtype]
                loop.append(f"mf::store<C{self.k}, {kind}, {where.run}>(team, j, {place}, "
                            f"{_column(where)}, {value});{comment}")  # fmt: skip
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
            word = "LongColumn" if self.layout.long else "Column"
            self.prologue.append(f"mf::{word}<C{self.k}> {name}(team, {pointer});  "
                                 f"// {root.node.origin}")  # fmt: skip
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
        rounding = self.e.rounding or bool(node.attrs.get("written"))
        text = pointwise_cpp(node, args, rounding, self.e.fast)
        if text == args[0]:
            return text  # a cast that changes nothing in registers
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
        where = access(offset(coords, node.shape), self.cols, self.layout.lanes, e.axis)
        kind = CPP_TYPE[node.dtype]
        name = f"{node.name}_{k}{'abcdefghijklmnop'[sum(n is node for n, _ in self.leaves)]}"
        fresh = node in self.written_before
        if where.column is None:
            if self._moves(offset(coords, node.shape)) or fresh:
                self.prologue.append(f"mf::Scalar<{kind}{', true' if fresh else ''}> {name};")
                self._fetch(name, _place(pointer, where), "")
                result = (f"{name}.value()", False)
            else:
                self.prologue.append(f"const mf::real {name} = mf::load({pointer}[{where.row}]);")
                result = (name, False)
        else:
            long = "long_" if self.layout.long else ""
            word = "stream" if where.kind == "run" else "splat"
            column = _column(where)
            if self._moves(offset(coords, node.shape)) or fresh:
                place = _place(pointer, where)
                if where.kind == "run" and self._ring(name, node, where, kind, column, place):
                    self.leaves[key] = (name, True)
                    return self.leaves[key]
                flag = ", true" if fresh else ""
                self.prologue.append(f"auto {name} = mf::{long}{word}<C{k}, {kind}, {where.run}"
                                     f"{flag}>({column});")  # fmt: skip
                self._fetch(name, place, "team, ")
            else:
                if not e.schedule.hold:
                    long = "long_"
                hold = "hold" if where.kind == "run" else "hold_splat"
                if long and where.kind == "splat":
                    long = ""
                self.prologue.append(f"const auto {name} = mf::{long}{hold}<C{k}, {kind}, "
                                     f"{where.run}>(team, {_place(pointer, where)}, "
                                     f"{column});")  # fmt: skip
            result = (name, True)
        self.leaves[key] = result
        return result

    def _ring(self, name: str, node: Node, where: Access, kind: str, column: str, place: str
              ) -> bool:  # fmt: skip
        """Stream through shared memory where the schedule says so and copies are wide enough."""
        schedule, layout = self.e.schedule, self.layout
        if schedule.depth < 2 or layout.long or where.run * node.dtype.itemsize < 4:
            return False
        self.prologue.append(
            f"auto {name} = mf::ring<C{self.k}, {kind}, {where.run}, {schedule.depth}, "
            f"{self.shared}, {schedule.threads}>({column});"
        )
        row = layout.steps * layout.lanes * node.dtype.itemsize * schedule.threads
        self.shared += schedule.depth * row
        self.ring_fetches.append(f"{name}.fetch(team, {place});")
        self.advances.append(f"{name}.advance();")
        return True

    def _moves(self, where: Affine) -> bool:
        """Whether the tensor is read elsewhere from row to row of one part."""
        fixed = self.col_set | set(kept_axes(self.e.region))
        return bool(where.axes - fixed)

    def _fetch(self, name: str, place: str, team: str) -> None:
        self.fetches.append(f"{name}.fetch({team}{place});")
        self.advances.append(f"{name}.advance();")

    def _plan_keeps(self, by_phase: list[list[Root]]) -> None:
        """Expensive values that more than one phase needs."""
        if self.layout.long:
            return
        needed: dict[tuple[Node, Coords], set[int]] = {}

        def visit(node: Node, coords: Coords, p: int, expand: bool = False) -> None:
            node, coords, what = self.settle(node, coords, expand)
            if what != "compute" or p in needed.setdefault((node, coords), set()):
                return
            needed[node, coords].add(p)
            for i in node.inputs:
                visit(i, operand_coords(node, i, coords), p)

        for p, roots in enumerate(by_phase):
            for root in roots:
                if root.kind == "store":
                    visit(root.node, root.at, p, root.target is root.node)
                else:
                    visit(root.node.inputs[0], root.at, p)
        for (node, coords), phases in needed.items():
            entry = pointwise.TABLE.get(node.op)
            costly = entry is not None and entry.expensive
            if len(phases) > 1 and costly and self.wide(node, coords):
                self.keeps[node, coords] = f"keep{self.k}_{len(self.keeps)}"

    # -- the row loop

    def loop(
        self, begin: str, end: str, step: str, rows: list[Axis], lines: list[str]
    ) -> list[str]:
        e = self.e
        names = [e.axis(a) for a in rows]
        row = f"Row{self.k}"
        fields = f"int {', '.join(names)};" if names else "char none;"
        values = ", ".join(decompose("r", rows, narrow=True)) if names else "0"
        unpack = [f"const i64 {n} = q.{n};" for n in names]
        used = "\n".join(lines)
        unpack_body = [f"const i64 {n} = row.{n};" for n in names if f"{n}" in used]
        keeps = [f"mf::Keep<C{self.k}> {name};" for name in self.keeps.values()]
        ring = bool(self.ring_fetches)
        k = self.k
        lambdas = [f"const auto fetch{k} = [&](const {row}& q) {{", *indent(unpack),
                   *indent(self.fetches), "};"]  # fmt: skip
        if ring:
            lambdas += [f"const auto fetch_ring{k} = [&](const {row}& q) {{", *indent(unpack),
                        *indent(self.ring_fetches), "};"]  # fmt: skip
        word = "rows" if e.schedule.ahead else "rows_now"
        if ring:
            word = f"rows_ring<{e.schedule.depth}>"
        also = f", fetch_ring{k}" if ring else ""
        return [
            f"struct {row} {{ {fields} }};",
            f"const auto row_of{k} = [&](int r) {{ return {row}{{{values}}}; }};",
            *lambdas,
            f"const auto advance{k} = [&] {{ {' '.join(self.advances)} }};",
            f"mf::{word}({begin}, {end}, {step}, row_of{k}, fetch{k}{also}, advance{k}, "
            f"[&](const {row}& row) {{",
            *indent(unpack_body), *indent(keeps), *indent(lines),
            "});",
        ]  # fmt: skip


def _targets(stage: Stage) -> set[Node]:
    return {r.target for r in stage.roots if r.kind != "row"}


def _place(pointer: str, where: Access) -> str:
    return pointer if where.row == "0" else f"{pointer} + {where.row}"


def _column(where: Access) -> str:
    capture = "&a" if where.symbolic_column else ""
    result = "i64" if where.symbolic_column else "int"
    return f"[{capture}](int c) -> {result} {{ return {where.column or '0'}; }}"
