"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone, so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megafuse.codegen.shelf import (
    NARROWEST,
    Shelved,
    pinnable,
    pinned_bytes,
    shelf_bytes,
    shelvable,
)
from megafuse.codegen.turn import ROOM, Tile, tile_for
from megafuse.device import DeviceSpec
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.fusion.walks import is_small, kept_axes
from megafuse.index import Axis, Coords, offset
from megafuse.ir import Node, evaluate, product

WIDEST = 8  # lanes of a vector on the device: 16 bytes of a 16-bit type
HOST_LANES = 32
HOST_CARRY = 16_384  # elements of a row that a host stack keeps between phases


@dataclass(frozen=True)
class StageSchedule:
    """columns: elements of a row; lanes: of one vector; steps: vectors a thread owns;
    long: the row does not fit in registers and is read again in each phase."""

    columns: int
    lanes: int
    steps: int
    long: bool


@dataclass(frozen=True)
class Schedule:
    """team: threads that share a row; teams: of a block; stages: one layout each; blocks: how many
    blocks a multiprocessor must be able to hold, which caps a thread's registers; depth: rows of
    the streamed tensors at hand and on their way in shared memory (0: in registers); lazy: the row
    at hand stays there and is read in every phase, instead of once into registers; ahead: without a
    ring, the next row's loads are issued before this row's arithmetic; hold: parameters stay in
    registers from row to row; keep: so do a row's intermediate values from phase to phase, where
    computing them again costs more; in_turn: parts take rows in turn, so that together they read
    one moving window of memory, instead of a span of rows each; shelf: what a group keeps in shared
    memory from stage to stage; tile: rows that a block takes together, to turn what lies across
    them; pinned: small tensors a group keeps in shared memory as float32 throughout; early: a ring
    that brings one row at a time begins with the next as soon as this one is in registers; once:
    norms take fewer reductions and instructions, see norms.py."""

    team: int
    teams: int
    stages: tuple[StageSchedule, ...]
    blocks: int = 1
    depth: int = 0
    lazy: bool = False
    ahead: bool = True
    hold: bool = True
    keep: bool = True
    in_turn: bool = True
    shelf: tuple[Shelved, ...] = ()
    tile: Tile | None = None
    pinned: tuple[Node, ...] = ()
    early: bool = True
    once: bool = True

    @property
    def threads(self) -> int:
        return self.team * self.teams

    @property
    def slots(self) -> int:
        """Rows that a ring has room for."""
        return self.depth if self.lazy else self.depth - 1


def columns_of(stage: Stage) -> int:
    columns = stage.columns()
    assert isinstance(columns, int)
    return columns


def host_schedule(region: RowRegion) -> Schedule:
    stages = []
    for stage in region.stages:
        n = columns_of(stage)
        stages.append(StageSchedule(n, HOST_LANES, -(-n // HOST_LANES), n > HOST_CARRY))
    return Schedule(1, 1, tuple(stages), keep=False, in_turn=False, once=False)


ELEMENTS = (40, 24, 8, 4, 2, 1)
"""Elements of a row a thread may own, most first: fewer threads meet at fewer barriers."""

FEW = 8  # elements of a thread, one vector of them
LINE = 64  # elements of a row that neighbouring threads take in one step: a cache line of 16 bits


@dataclass(frozen=True)
class _Way:
    """How a row's tensors reach the arithmetic: see Schedule."""

    ring: bool
    hold: bool
    lazy: bool = False
    ahead: bool = True


ROW_WAYS = (_Way(True, True), _Way(True, True, lazy=True), _Way(True, False), _Way(False, False),
            _Way(False, False, ahead=False), _Way(False, True))  # fmt: skip
COLUMN_WAYS = (_Way(True, True), _Way(True, False), _Way(False, True), _Way(False, False))
FEW_WAYS = (_Way(False, True), _Way(False, False), _Way(False, False, ahead=False))

MANY_ROWS = 8_192
"""From here on there are rows enough for every multiprocessor whatever the layout."""

THREADS = 256  # of a block, where a row needs fewer
CROWDED = 384  # of a group's block that has a multiprocessor to itself and sums no columns
GROUP_THREADS = 128  # of a group's block, or four teams: it has few rows at a time
LONE = 192  # threads of a row from which on a block has but one
CROWD = 20  # warps on a multiprocessor then
TILED_WAYS = (
    (4, 24, True), (3, 24, True), (3, 8, True), (2, 24, True), (2, 24, False), (2, 8, True),
    (2, 8, False), (1, 24, False), (1, 8, False), (1, 40, False),
)  # fmt: skip
"""Blocks that turn tiles on a multiprocessor, elements of a thread, whether parameters are held."""
FEWEST_WARPS = 8  # on a multiprocessor, where there are rows enough for them
REGISTERS = 330  # a layout that needs more by our estimate is not worth compiling
REGISTERS_OF_SM = 65_536
SHARED = 200_000  # bytes of rings a block may have
PINNED = 8_192  # elements of a tensor that a group may keep unpacked in shared memory
ON_THE_WAY = 36_000  # bytes of next rows that hide the memory's latency


def cuda_schedules(region: RowRegion, rows: int) -> Iterator[Schedule]:
    """Layouts in order of preference. The builder takes the first that the assembler fits into
    registers without spilling. rows: how many there are, roughly.

    The order is what sweeps on an H200 found (docs/perf-log.md): few threads share a row, each with
    many elements, because instructions and barriers of a row are what costs; streams go through
    rings in shared memory, because the assembler issues register prefetches too late; parameters
    and intermediate values stay in registers where there is room.
    """
    columns = any(r.kind == "column" for r in region.roots)
    many, group = rows >= MANY_ROWS, region.kind == "group"
    if many and not group and (tile := tile_for(region)) is not None:
        yield from _tiled(region, tile)
    # Few rows: threads are what there is plenty of.
    sizes = ELEMENTS if many else [e for e in ELEMENTS if e <= FEW]
    ways = (COLUMN_WAYS if columns else ROW_WAYS) if many else FEW_WAYS
    order = [(e, w) for e in sizes for w in ways]
    if columns:  # held parameters count for more than few threads
        order = [(e, w) for w in ways for e in sizes]
    for elements, way in order:
        team, widest = _team(region, elements)
        stages = tuple(_layout(stage, team, widest) for stage in region.stages)
        teams = max(1, (THREADS if many else 64) // team)
        if group:
            teams = min(teams, max(4, GROUP_THREADS // team))
        depth = max(_depth(s, teams) for s in region.stages) if way.ring else 0
        schedule = Schedule(team, teams, stages, 1, depth, way.lazy, way.ahead, way.hold, many)
        if group and many and way.ring:
            yield from _shelved(region, schedule, columns)
        if _shared_bytes(region, schedule) > SHARED:
            continue
        if group and not many:
            yield from _together(region, schedule)
        fits = all(
            _registers(s, schedule) * x.steps * x.lanes + 40 <= REGISTERS
            for s, x in zip(region.stages, stages, strict=True)
        )
        if many and not group and not columns and teams == 1 and team >= LONE:
            yield _crowded(region, schedule)
        if fits or elements == ELEMENTS[-1]:
            yield schedule


def _tiled(region: RowRegion, tile: Tile) -> Iterator[Schedule]:
    """Layouts of blocks that turn tiles: rather several blocks on a multiprocessor, of which some
    load while others compute, than few threads a row."""
    tried: list[Schedule] = []
    for blocks, elements, hold in TILED_WAYS:
        team, widest = _team(region, elements)
        stages = tuple(_layout(stage, team, widest) for stage in region.stages)
        warp = max(1, 32 // team)
        teams = max(warp, min(THREADS // team, tile.rows) // warp * warp)
        found = Schedule(team, teams, stages, min(blocks, tile.blocks), hold=hold, tile=tile)
        if not any(x.long for x in stages) and found not in tried:
            tried.append(found)
            yield found


def _crowded(region: RowRegion, schedule: Schedule) -> Schedule:
    """The same for several blocks a multiprocessor: where a whole block meets at a barrier for each
    reduction of its one row, other blocks have to work meanwhile."""
    blocks = -(-CROWD // (schedule.team // 32))
    while blocks > 1 and blocks * (_shared_bytes(region, schedule) + 1024) > ROOM:
        blocks -= 1
    return replace(schedule, blocks=blocks)


def _shelved(region: RowRegion, schedule: Schedule, columns: bool) -> Iterator[Schedule]:
    """The same with a shelf. A shelf as large as a multiprocessor leaves room for one block, which
    then has all the threads: with column sums, whose registers each of them needs, half as many."""
    fewest = min(_group_rows(region, s) for s in region.stages)
    wide = replace(schedule, stages=tuple(_layout(s, schedule.team, WIDEST) for s in region.stages))
    crowded = CROWDED // schedule.team
    found: Schedule | None = None
    if schedule.hold and not columns and fewest >= 2 * crowded:
        found = with_shelf(region, replace(wide, teams=crowded), pin=False)
    elif columns:  # which need the registers of parameters: those are unpacked in shared memory
        teams = max(schedule.teams, THREADS // schedule.team)
        found = with_shelf(region, replace(wide, teams=teams, hold=False))
    if found is not None:
        yield found
    teams = max(schedule.teams, THREADS // schedule.team)
    if (found := with_shelf(region, replace(schedule, teams=teams))) is not None:
        yield found


def _together(region: RowRegion, schedule: Schedule) -> Iterator[Schedule]:
    """The same with many threads, a warp a row or as it is: a group is one block's, and few groups
    leave most multiprocessors idle, so that what counts is how long a group takes."""
    fewest = min(_group_rows(region, s) for s in region.stages)
    warps = replace(schedule, team=32, stages=tuple(_layout(s, 32, WIDEST) for s in region.stages))
    for form, threads in itertools.product((warps, schedule), (2 * THREADS, CROWDED, THREADS)):
        teams = min(threads // form.team, fewest)
        room = min(255, REGISTERS_OF_SM // max(1, teams * form.team))
        if teams * form.team > schedule.threads and not any(x.long for x in form.stages) and all(
            _registers(s, replace(form, hold=False)) * x.steps * x.lanes + 40 <= room
            for s, x in zip(region.stages, form.stages, strict=True)
        ):  # fmt: skip
            yield replace(form, teams=teams, hold=False)


def _group_rows(region: RowRegion, stage: Stage) -> int:
    rows = product(a.extent for a in stage.rows() if a not in region.group)
    return rows if isinstance(rows, int) else 0


def with_shelf(region: RowRegion, schedule: Schedule, pin: bool = True) -> Schedule | None:
    """The same layout with what is worth it on the shelf, small tensors unpacked beside it (pin),
    and the rings as deep as the room left allows; None where nothing fits."""
    plain = replace(schedule, depth=2, shelf=(), pinned=())
    for item in shelvable(region):
        layout = schedule.stages[item.stage]
        narrow = not item.made and layout.lanes * item.node.dtype.itemsize < NARROWEST
        trial = replace(plain, shelf=(*plain.shelf, item))
        if not (narrow or layout.long) and _shared_bytes(region, trial) <= ROOM:
            plain = trial
    if not plain.shelf:
        return None
    for node, moves in pinnable(region, PINNED if pin else 0):
        trial = replace(plain, pinned=(*plain.pinned, node))
        if (moves or not plain.hold) and _shared_bytes(region, trial) <= ROOM:
            plain = trial
    deeper = (replace(plain, depth=d) for d in range(schedule.depth, 1, -1))
    return next((s for s in deeper if _shared_bytes(region, s) <= ROOM), plain)


def _served(region: RowRegion, schedule: Schedule) -> set[tuple[Node, Coords]]:
    """Reads that find their tensor on the shelf."""
    return {
        (read.node, read.coords)
        for k, stage in enumerate(region.stages) for r in stage.roots for read in r.reads
        for item in schedule.shelf
        if item.node is read.node
        and item.serves(k, offset(read.coords, read.node.room), region)
    }  # fmt: skip


def _shared_bytes(region: RowRegion, schedule: Schedule) -> int:
    """Bytes of the shelf, and of the rings of the stage that has most of them."""
    served = _served(region, schedule)
    pairs = zip(region.stages, schedule.stages, strict=True)
    rings = max(_ring_bytes(stage, layout, schedule, served) for stage, layout in pairs)
    return shelf_bytes(schedule.shelf) + pinned_bytes(schedule.pinned) + rings


def _depth(stage: Stage, teams: int) -> int:
    """Rows in a ring: enough bytes beyond the one that is worked on."""
    row = teams * columns_of(stage) * sum(d.itemsize for d, varies in _streams(stage) if varies)
    return min(4, 1 + max(1, -(-ON_THE_WAY // max(row, 1))))


def _lanes(stage: Stage) -> int:
    """The widest vector that divides the row and is 16 bytes of the stage's widest tensor."""
    n = columns_of(stage)
    cols = stage.settled_cols()
    widest = max(
        (read.node.dtype.itemsize for root in stage.roots for read in root.reads
         if cols and offset(read.coords, read.node.room).coefficient(cols[-1]) == 1),
        default=max((r.target.dtype.itemsize for r in stage.roots if r.kind == "store"), default=4),
    )  # fmt: skip
    return next(v for v in (WIDEST, 4, 2, 1) if n % v == 0 and v * widest <= 16)


def _streams(
    stage: Stage, served: Collection[tuple[Node, Coords]] = ()
) -> list[tuple[torch.dtype, bool]]:
    """(dtype, whether it changes from row to row) of every tensor that rows take along: read along
    the row in runs, and neither on the shelf nor so small that it is read where it is used."""
    cols = stage.settled_cols()
    seen = {
        (read.node, read.coords): any(c.axes - set(cols) for c in read.coords)
        for root in stage.roots for read in root.reads
        if cols and offset(read.coords, read.node.room).coefficient(cols[-1]) == 1
        and (read.node, read.coords) not in served
    }  # fmt: skip
    return [(n.dtype, varies) for (n, _), varies in seen.items() if not (varies and is_small(n))]


def _registers(stage: Stage, schedule: Schedule) -> float:
    """Registers a thread needs for each element it owns, roughly."""
    need = 3.0  # values in flight
    for dtype, varies in _streams(stage):
        words = dtype.itemsize / 4
        if not varies:
            need += words if schedule.hold else 0
        elif schedule.depth == 0:
            need += words * (2 if schedule.ahead else 1)
        elif not schedule.lazy:
            need += words
    return need + sum(r.kind == "column" for r in stage.roots)


def _ring_bytes(
    stage: Stage,
    layout: StageSchedule,
    schedule: Schedule,
    served: Collection[tuple[Node, Coords]],
) -> int:
    """Bytes of the stage's rings, each thread's vectors whole."""
    if layout.long:
        return 0
    moving = sum(dtype.itemsize for dtype, varies in _streams(stage, served) if varies)
    return max(schedule.slots, 0) * schedule.threads * layout.steps * layout.lanes * moving


def _layout(stage: Stage, team: int, widest: int = WIDEST) -> StageSchedule:
    n, lanes = columns_of(stage), min(_lanes(stage), widest)
    steps = -(-(n // lanes) // team)
    return StageSchedule(n, lanes, steps, steps * lanes > MOST_ELEMENTS)


MOST_ELEMENTS = 64  # a thread with more walks its row in a loop and reads it again in each phase


def _team(region: RowRegion, elements: int) -> tuple[int, int]:
    """(threads a row, lanes of a vector at most): as few threads as hold the row with at most
    `elements` each, few of them idle, and vectors as wide as that allows."""
    best: tuple[float, int, int] | None = None
    for team, widest in itertools.product([1, 2, 4, 8, 16, *range(32, 1025, 32)], (WIDEST, 4)):
        waste, fits = 0.0, True
        for stage in region.stages:
            lanes = min(_lanes(stage), widest)
            vectors = columns_of(stage) // lanes
            steps = -(-vectors // team)
            fits &= steps * lanes <= max(lanes, elements) and team >= min(vectors, LINE // lanes)
            waste = max(waste, team * steps / vectors)
        if not fits and team < 512:
            continue
        price = waste + 0.003 * team + (0.0 if fits else 10.0) + (0.05 if widest < WIDEST else 0)
        if best is None or price < best[0]:
            best = (price, team, widest)
    assert best is not None
    return best[1:]


FEW_KEPT = 4_096
"""Up to so many kept indices a block of its own for each is no waste."""


def by_block(region: RowRegion, schedule: Schedule) -> bool:
    """Whether a part of the work is a block's, all its teams together, and not a team's own."""
    return region.kind == "group" or schedule.tile is not None


def together(region: RowRegion, schedule: Schedule) -> bool:
    """Whether the teams of a block add their column sums up before they write them: all of them
    then work on the same kept index."""
    if schedule.teams == 1 or any(x.long for x in schedule.stages):
        return False
    if not any(r.kind == "column" for r in region.roots):
        return False
    many = product(a.extent for a in kept_axes(region))
    return by_block(region, schedule) or (isinstance(many, int) and many <= FEW_KEPT)


def shared_sums(region: RowRegion, schedule: Schedule) -> int:
    """Bytes of shared memory in which a block's teams add up, doubles counted."""
    own = max(x.steps * x.lanes for x in schedule.stages)
    return (schedule.teams + 1) // 2 * schedule.team * own * 8


@dataclass(frozen=True)
class Launch:
    """parts: blocks of a group or tiled region, else teams with work; chunks: parts a kept index
    has; span: rows (groups, tiles) a part walks; grid: blocks."""

    parts: int
    chunks: int
    span: int
    grid: int


def launch(
    region: RowRegion,
    kept: Sequence[Axis],
    schedule: Schedule,
    sizes: Mapping[str, int],
    device: DeviceSpec,
    blocks_per_sm: int,
) -> Launch:
    """One wave of blocks, each with an equal share of the rows (or groups)."""
    outer = region.group if region.kind == "group" else region.stages[0].rows()
    total = evaluate(product(a.extent for a in outer), sizes)
    if schedule.tile is not None:
        total = schedule.tile.count(region, sizes)
    keep = evaluate(product(a.extent for a in kept), sizes)
    reduced = max(1, total // keep)
    units = device.sm_count * blocks_per_sm
    blocks = by_block(region, schedule)
    if not blocks:
        units *= schedule.teams
    chunks = max(1, min(reduced, units // keep))
    span = -(-reduced // chunks)
    if schedule.tile is None:  # tiles are few: rather one more for some than fewer blocks
        chunks = -(-reduced // span)
    if together(region, schedule) and not blocks:
        chunks = -(-chunks // schedule.teams) * schedule.teams  # those past the rows add zero
    parts = keep * chunks
    grid = parts if blocks else -(-parts // schedule.teams)
    return Launch(parts, chunks, span, grid)
