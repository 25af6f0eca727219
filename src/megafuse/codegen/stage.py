"""One stage of a row region as tile C++: the phases of a row and the values in them."""

from __future__ import annotations

from megafuse.codegen.emitter import Emitter, indent
from megafuse.codegen.expr import CPP_TYPE, pointwise_cpp, rounded, scalar_cpp
from megafuse.codegen.norms import moments, scaled_once
from megafuse.codegen.schedule import StageSchedule, together
from megafuse.codegen.streams import RowStreams, place_cpp
from megafuse.codegen.turning import COLUMN
from megafuse.fusion.plan import Root, Stage
from megafuse.fusion.roots import resolve
from megafuse.fusion.rules.same_rows import produced
from megafuse.fusion.rules.turn import Turned
from megafuse.index import Coords, offset, operand_coords
from megafuse.ir import Node
from megafuse.ops import is_reduction, is_view, pointwise

KEPT = 3
"""Instructions an element from which on keeping a value pays for the register it takes."""


class StageEmitter:
    """One stage: streams, phases and stores."""

    def __init__(
        self, e: Emitter, k: int, stage: Stage, layout: StageSchedule,
        streams: RowStreams | None = None,
    ) -> None:  # fmt: skip
        """streams: where buffers are read, by default as `layout` says."""
        self.e, self.k, self.stage, self.layout = e, k, stage, layout
        self.streams = streams or RowStreams(e, k, stage, layout)
        self.col_set = self.streams.col_set
        self.made = produced(stage)
        self.epilogue: list[str] = []  # after all rows
        self.scalars: dict[tuple[Node, Coords], str] = {}
        self.phases: dict[tuple[Node, Coords], int] = {}
        self.keeps: dict[tuple[Node, Coords], str] = {}
        self.kept_done: set[tuple[Node, Coords]] = set()
        self.shifts: dict[tuple[Node, Coords], str] = {}
        self.counter = 0
        exact = layout.steps * layout.lanes * e.schedule.team == layout.columns
        loose = e.schedule.once and e.fast and not e.rounding
        self.moments = None
        if loose and exact and not layout.long:
            self.moments = moments(stage, self.settle)
        needed = [r for r in stage.roots if self.moments is None or r is not self.moments[1]]
        self.scaled = scaled_once(needed, self.settle) if loose else set()

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
        if own_store and is_view(node) and not expand:  # stored in this very walk: look through it
            return self.settle(node, coords, expand=True)
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
        if self.moments is not None and root is self.moments[1]:
            root = self.moments[0]
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
        lines = [f"mf::Keep<C{self.k}> {name};" for name in self.keeps.values()]
        after_first = 0
        for p, mine in enumerate(by_phase):
            before: list[str] = []
            loop: list[str] = []
            memo: dict[tuple[Node, Coords], str] = {}
            sums: list[tuple[Root, str]] = []
            for root in mine:
                self._root(root, before, loop, memo, sums)
            for root, accumulator in sums:
                word = {"sum": "Sum", "amax": "Max", "amin": "Min"}[root.node.op]
                if self.moments is not None:
                    word = "Moments"
                before.append(f"mf::{word}<C{self.k}> {accumulator};")
            lines += before
            if loop:
                word = "MF_LOOP" if self.layout.long else "MF_STEPS"
                lines += [f"{word}(j, C{self.k}) {{", *indent(loop), "}"]
            if p == 0:
                after_first = len(lines)
            lines += self._combine(sums, p)
        if self.streams.ring_fetches:
            lines.insert(0 if self.streams.early else after_first, "copies();")
        return lines

    def _combine(self, sums: list[tuple[Root, str]], p: int) -> list[str]:
        lines: list[str] = []
        if self.moments is not None and sums:
            pack = f"moments{self.k}"
            lines.append(f"const auto {pack} = team.moments({sums[0][1]});")
            for i, root in enumerate(self.moments):
                name = self.scalars[root.node, root.out()] = f"{root.node.name}_"
                lines.append(f"const mf::real {name} = {pack}[{i}];  // {root.node.origin}")
            return lines
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
            at = offset(root.where, root.target.room)
            where = self.streams.access(at)
            comment = f"  // {root.node.origin}"
            kind = CPP_TYPE[root.target.dtype]
            kept = self.streams.shelved(root.target)
            if kept is not None and kept[0].made:
                there, byte = self.streams.on_shelf(*kept, at)
                loop.append(f"mf::shelve<C{self.k}, {kind}, {there.run}>(team, j, {byte}, "
                            f"{self.streams.column(there)}, {value});{comment}")  # fmt: skip
                if kept[0].alone:
                    return
            turned = self.streams.turning.place(Turned(root.target, at, True))
            if turned is not None:
                loop.append(f"mf::shelve<C{self.k}, {kind}, {self.layout.lanes}>(team, j, "
                            f"{turned}, {COLUMN}, {value});{comment}")  # fmt: skip
                return
            place = place_cpp(self.e.pointer(root.target, write=True), where)
            if wide:
                loop.append(f"mf::store<C{self.k}, {kind}, {where.run}>(team, j, {place}, "
                            f"{self.streams.column(where)}, {value});{comment}")  # fmt: skip
            else:
                before.append(f"team.store({place}, {value});{comment}")
        elif self.moments is not None and root is self.moments[1]:
            pass  # comes with the sum
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
            self.streams.prologue.append(f"{kind} {name}(team, {pointer});  // {root.node.origin}")
            write = "write_block" if together(self.e.region, self.e.schedule) else "write"
            self.epilogue.append(f"{name}.{write}(team);")
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
            name, wide = self.streams.leaf(node, coords)
            if not wide:
                return name
            memo[key] = self._name(f"{name}.at(team, j)", node, loop)
            return memo[key]
        if key in self.keeps and key in self.kept_done:
            memo[key] = self._name(f"{self.keeps[key]}.at(j)", node, loop)
            return memo[key]
        text = self._scaled(node, coords, before, loop, memo)
        if not text:
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

    def _scaled(self, node: Node, coords: Coords, before: list[str], loop: list[str],
                memo: dict[tuple[Node, Coords], str]) -> str:  # fmt: skip
        """(x - mean) * scale as one instruction, where `node` is that and the last two are the same
        for all elements of a row, or for runs of them; else nothing."""
        if node.op != "mul" or len(node.inputs) != 2:
            return ""
        sides = [self.settle(i, operand_coords(node, i, coords)) for i in node.inputs]
        for (d, at, what), scale in (sides, sides[::-1]):
            if what != "compute" or (d, at) not in self.scaled or (d, at) in self.keeps:
                continue
            if len(d.inputs) != 2:
                continue
            x, mean = (self.settle(i, operand_coords(d, i, at)) for i in d.inputs)
            if not (self._is_even(mean) and self._is_even(scale)) or self._is_even(x):
                continue
            v, m, s = (self.value(n, c, before, loop, memo) for n, c, _ in (x, mean, scale))
            key = (d, at)
            if self.wide(*mean[:2]) or self.wide(*scale[:2]):
                shift = self._name(f"({m} * {s})", d, loop)
            elif key in self.shifts:
                shift = self.shifts[key]
            else:
                shift = self.shifts[key] = f"shift{len(self.shifts)}"
                before.append(f"const mf::real {shift} = {m} * {s};  // {d.name}: {d.origin}")
            return f"mf::fma({v}, {s}, -{shift})"
        return ""

    def _is_even(self, found: tuple[Node, Coords, str]) -> bool:
        """Whether a value is the same for all elements of a row, or read for runs of them."""
        node, coords, what = found
        if not self.wide(node, coords):
            return True
        return what == "leaf" and self.streams.access(offset(coords, node.shape)).kind == "splat"

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
                if self.moments is not None and root is self.moments[1]:
                    continue
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
