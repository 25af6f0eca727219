"""A row region as tile C++: one source, compiled against `tile/host.h` or `tile/cuda.cuh`.

A stage walks its rows in phases separated by row reductions. Each phase is a loop over the thread's
vectors that computes whatever its reductions, sums and stores need, from streams that hold the row;
cheap values are recomputed in each phase, expensive ones carried over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megafuse.codegen.address import access, decompose, dim_cpp, sum_cpp
from megafuse.codegen.emitter import Arg, Emitter, indent
from megafuse.codegen.expr import CPP_TYPE
from megafuse.codegen.schedule import Schedule, by_block, shared_sums, together
from megafuse.codegen.shelf import pinned_bytes, shelf_bytes
from megafuse.codegen.stage import StageEmitter
from megafuse.fusion.plan import RowRegion
from megafuse.fusion.walks import kept_axes
from megafuse.index import Affine, Axis, offset
from megafuse.ir import Dim, Node, as_dim, product


@dataclass
class RowKernel:
    """Generated source of one region. kept: row axes that column sums keep apart, outermost of the
    parts; partial_columns: row length of each column sum; finish: name of the second step; shared:
    bytes of dynamic shared memory of a block; inside: what never leaves it, and needs no memory."""

    name: str
    source: str
    args: list[Arg]
    schedule: Schedule
    kept: list[Axis]
    partial_columns: list[int]
    finish: str | None
    fast: bool
    shared: int = 0
    inside: frozenset[Node] = frozenset()

    @property
    def names(self) -> list[str]:
        return [self.name, *([self.finish] if self.finish else [])]


def emit_rows(
    region: RowRegion, buffers: set[Node], schedule: Schedule, rounding: bool, name: str
) -> RowKernel:
    """Source of `region`. rounding: reproduce every cast of eager's operator boundaries."""
    e = Emitter(region, buffers, schedule, rounding, is_fast(region))
    kept = kept_axes(region)
    group = region.kind == "group"
    body: list[str] = []
    for k, layout in enumerate(schedule.stages):
        body.append(f"using C{k} = mf::Cols<{layout.columns}, {layout.lanes}, {schedule.team}, "
                    f"{layout.steps}>;")  # fmt: skip
    stages = [StageEmitter(e, k, s, layout) for k, (s, layout) in
              enumerate(zip(region.stages, schedule.stages, strict=True))]  # fmt: skip
    outer = region.group if group else region.stages[0].rows()
    rest = [a for a in outer if a not in kept]
    step = "a.chunks" if schedule.in_turn else "1"
    part = "team.block()" if by_block(region, schedule) else "team.part()"
    body.append(f"const i64 kept = {part} / a.chunks, chunk = {part} % a.chunks;")
    body += [] if schedule.tile is not None else [
        f"const i64 begin = chunk, end = {_extent(rest)};" if schedule.in_turn else
        f"const i64 begin = chunk * a.span, end = mf::min_i64(begin + a.span, {_extent(rest)});",
    ]  # fmt: skip
    for axis, text in zip(kept, decompose("kept", _extents(kept)), strict=True):
        body.append(f"const i64 {e.axis(axis)} = {text};")
    programs = [s.program() for s in stages]
    body += _pin(e)
    for s in stages:
        body += s.streams.prologue
    if group:
        body.append(f"for (i64 g = begin; g < end; g += {step}) {{")
        for axis, text in zip(rest, decompose("g", _extents(rest)), strict=True):
            body.append(f"  const i64 {e.axis(axis)} = {text};")
        for s, lines in zip(stages, programs, strict=True):
            rows = [a for a in s.stage.rows() if a not in region.group]
            body += indent(s.streams.group_prologue)
            body += indent(
                s.streams.loop("team.index()", _extent(rows), str(schedule.teams), rows, lines)
            )
            body.append("  team.block_sync();")
        body.append("}")
    elif schedule.tile is not None:
        body += stages[0].streams.turning.loop(rest, programs[0])
    else:
        body += stages[0].streams.loop("begin", "end", step, rest, programs[0])
    for s in stages:
        body += s.epilogue

    for size in sorted(_sizes_in(body, e)):
        e.args["size", size] = Arg("size", size)
        e.members.append(f"i64 {size};")
    finish = _finish(e, kept) if e.sums else []
    for size in sorted(_sizes_in(finish, e)):
        e.args["size", size] = Arg("size", size)
        e.members.append(f"i64 {size};")
    for word in ("parts", "chunks", "span"):
        e.args[word, 0] = Arg(word, word)
        e.members.append(f"i64 {word};")
    lines = [
        *_header(region),
        f"struct {name} {{",
        f"  using Team = mf::Team<{schedule.team}, {schedule.teams}>;",
        f"  static constexpr int min_blocks = {schedule.blocks};",
        "  struct Args {", *indent(e.members, 4), "  };",
        "  MF_FN static void run(const Team& team, const Args& a) {", *indent(body, 4), "  }",
        "};",
        f"MF_{'GROUP_' if by_block(region, schedule) else ''}KERNEL({name})",
    ]  # fmt: skip
    if finish:
        lines += [
            f"struct {name}_finish {{",
            f"  using Args = {name}::Args;",
            "  MF_FN static void run(const mf::Finisher& f, const Args& a) {",
            *indent(finish, 4), "  }", "};", f"MF_FINISH({name}_finish)",
        ]  # fmt: skip
    return RowKernel(
        name, "\n".join(lines) + "\n", list(e.args.values()), schedule, kept, e.partials,
        f"{name}_finish" if finish else None, e.fast,
        max(*(s.streams.rings for s in stages),
            shared_sums(region, schedule) if together(region, schedule) else 0),
        frozenset(s.node for s in schedule.shelf if s.alone),
    )  # fmt: skip


def _pin(e: Emitter) -> list[str]:
    """Small tensors brought into shared memory, before anything reads them there."""
    start, lines = shelf_bytes(e.schedule.shelf), []
    for node in e.schedule.pinned:
        size = dim_cpp(product(node.shape))
        lines.append(f"mf::pin(team, {e.pointer(node)}, {size}, {start});")
        start += pinned_bytes([node])
    return [*lines, "team.block_sync();"] if lines else []


def is_fast(region: RowRegion) -> bool:
    """Whether every tensor stored is 16 bits wide: approximate instructions are exact enough."""
    cols = _all_cols(region)
    stored = [r.target.dtype for r in region.roots
              if r.kind == "column" or (r.kind == "store" and r.axes & cols)]  # fmt: skip
    return all(d.itemsize <= 2 for d in stored) and bool(stored)


def _all_cols(region: RowRegion) -> set[Axis]:
    return {a for s in region.stages for a in s.settled_cols()}


def _header(region: RowRegion) -> list[str]:
    lines = [f"// {region.name}: {region.kind} region"]
    for k, stage in enumerate(region.stages):
        rows = " x ".join(str(a.extent) for a in stage.rows()) or "1"
        lines.append(f"//   stage {k}: {rows} rows of {stage.columns()} elements")
    return lines


def _extents(axes: Sequence[Axis]) -> list[Dim]:
    return [a.extent for a in axes]


def _extent(axes: Sequence[Axis]) -> str:
    return dim_cpp(product(a.extent for a in axes))


def _sizes_in(lines: Sequence[str], e: Emitter) -> set[str]:
    found = set(re.findall(r"\ba\.(s\d+)\b", "\n".join(lines)))
    return {s for s in found if ("size", s) not in e.args}


def _finish(e: Emitter, kept: list[Axis]) -> list[str]:
    """Each column sum: its partials, added up in order of the parts that made them."""
    lines: list[str] = []
    teams, group = e.schedule.teams, by_block(e.region, e.schedule)
    # Partials lie a team apart. With one a block, every `apart`th of them counts.
    apart = teams if together(e.region, e.schedule) else 1
    if group:
        per, whole = ("a.chunks", "a.parts") if apart > 1 or teams == 1 else (
            f"a.chunks * {teams}", f"a.parts * {teams}")  # fmt: skip
    else:
        per, whole = (f"(a.chunks / {apart})", f"a.parts / {apart}") if apart > 1 else (
            "a.chunks", "a.parts")  # fmt: skip
    for number, (root, stage, pointer) in enumerate(e.sums):
        cols = stage.settled_cols()
        own = [a for a in kept if a in root.axes and a not in root.reduced]
        others = [a for a in kept if a not in own]
        # part = position over all kept axes * (chunks * teams) + position inside
        strides: dict[Axis, Dim] = {}
        step: Dim = 1
        for axis in reversed(kept):
            strides[axis] = step
            step = as_dim(step * axis.extent)
        where = offset(root.where, root.target.room)
        k_names = dict(zip(own, decompose("k", _extents(own)), strict=True))
        i_names = dict(zip(others, decompose(f"i / ({per})", _extents(others)), strict=True))
        terms = [(f"({n})", strides[a]) for a, n in {**k_names, **i_names}.items()]
        inside = f"i % ({per})" if others else "i"
        index = f"({sum_cpp(terms)}) * ({per}) + {inside}" if terms else inside
        count = f"{_extent(others)} * {per}" if others else per
        own_terms = [(f"({n})", where.coefficient(a)) for a, n in k_names.items()]
        if not own:
            index, count = "i", whole
        if apart > 1:
            index = f"({index}) * {apart}"
        column = access(Affine.make([(a, where.coefficient(a)) for a in cols]), cols, 1, str).column
        out = sum_cpp(own_terms, where.const)
        target = e.pointer(root.target, write=True)
        lines.append(
            f"f.column<{CPP_TYPE[root.target.dtype]}>({number}, {pointer}, {stage.columns()}, "
            f"{_extent(own)}, {count},"
            f" [&](i64 k, i64 i) {{ return {index}; }},"
            f" [&](i64 k, int c) {{ return {target} + {out} + {column or '0'}; }});"
            f"  // {root.node.origin}"
        )
    return lines
