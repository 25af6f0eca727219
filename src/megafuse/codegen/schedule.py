"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone, so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megafuse.codegen.shelf import NARROWEST, Shelved, shelf_bytes, shelvable
from megafuse.device import DeviceSpec
from megafuse.fusion.plan import RowRegion, Stage
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
    the streamed tensors on their way in shared memory (0: registers); lazy: they are read from
    there in every phase instead of once; ahead: without a ring, the next row's loads are issued
    before this row's arithmetic; hold: parameters stay in registers from row to row; keep: so do a
    row's intermediate values from phase to phase, where computing them again costs more; in_turn:
    parts take rows in turn, so that together they read one moving window of memory, instead of a
    span of rows each; shelf: what a group keeps in shared memory from stage to stage."""

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

    @property
    def threads(self) -> int:
        return self.team * self.teams


def columns_of(stage: Stage) -> int:
    columns = stage.columns()
    assert isinstance(columns, int)
    return columns


def host_schedule(region: RowRegion) -> Schedule:
    stages = []
    for stage in region.stages:
        n = columns_of(stage)
        stages.append(StageSchedule(n, HOST_LANES, -(-n // HOST_LANES), n > HOST_CARRY))
    return Schedule(1, 1, tuple(stages), keep=False, in_turn=False)


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
GROUP_THREADS = 128  # of a group's block, or four teams: it has few rows at a time
LONE = 192  # threads of a row from which on a block has but one
CROWD = 20  # warps on a multiprocessor then
FEWEST_WARPS = 8  # on a multiprocessor, where there are rows enough for them
REGISTERS = 330  # a layout that needs more by our estimate is not worth compiling
SHARED = 200_000  # bytes of rings a block may have
ROOM = 227 * 1024 - 2048  # bytes of shared memory of a block, less what reductions exchange
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
        if group and many and way.ring and (better := _with_shelf(region, schedule)) is not None:
            yield better
        if _shared_bytes(region, schedule) > SHARED:
            continue
        fits = all(
            _registers(s, schedule) * x.steps * x.lanes + 40 <= REGISTERS
            for s, x in zip(region.stages, stages, strict=True)
        )
        if many and not group and not columns and teams == 1 and team >= LONE:
            yield _crowded(region, schedule)
        if fits or elements == ELEMENTS[-1]:
            yield schedule


def _crowded(region: RowRegion, schedule: Schedule) -> Schedule:
    """The same for several blocks a multiprocessor: where a whole block meets at a barrier for each
    reduction of its one row, other blocks have to work meanwhile."""
    blocks = -(-CROWD // (schedule.team // 32))
    while blocks > 1 and blocks * (_shared_bytes(region, schedule) + 1024) > ROOM:
        blocks -= 1
    return replace(schedule, blocks=blocks)


def _with_shelf(region: RowRegion, schedule: Schedule) -> Schedule | None:
    """The same layout with what is worth it on the shelf, and the rings as deep as the room left
    allows; None where nothing fits. A shelf as large as a multiprocessor leaves room for one block,
    which then has all the threads."""
    teams = max(schedule.teams, THREADS // schedule.team)
    plain = replace(schedule, teams=teams, depth=2)
    for item in shelvable(region):
        layout = schedule.stages[item.stage]
        narrow = not item.made and layout.lanes * item.node.dtype.itemsize < NARROWEST
        trial = replace(plain, shelf=(*plain.shelf, item))
        if not (narrow or layout.long) and _shared_bytes(region, trial) <= ROOM:
            plain = trial
    if not plain.shelf:
        return None
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
    return shelf_bytes(schedule.shelf) + rings


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
         if cols and offset(read.coords, read.node.room).coefficient(cols[-1]) == 1), default=4,
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


CACHED = 16_384
"""Bytes of a tensor that stays in the nearest cache however often its rows are read."""


def is_small(node: Node) -> bool:
    """Whether rows of the tensor are read where they are used, from the nearest cache."""
    numbers = [d for d in node.shape if isinstance(d, int)]
    return len(numbers) == len(node.shape) and math.prod(numbers) * node.dtype.itemsize <= CACHED


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
    return schedule.depth * schedule.threads * layout.steps * layout.lanes * moving


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


def together(region: RowRegion, schedule: Schedule) -> bool:
    """Whether the teams of a block add their column sums up before they write them: all of them
    then work on the same kept index."""
    if schedule.teams == 1 or any(x.long for x in schedule.stages):
        return False
    if not any(r.kind == "column" for r in region.roots):
        return False
    many = product(a.extent for a in kept_axes(region))
    return region.kind == "group" or (isinstance(many, int) and many <= FEW_KEPT)


def shared_sums(region: RowRegion, schedule: Schedule) -> int:
    """Bytes of shared memory in which a block's teams add up, doubles counted."""
    own = max(x.steps * x.lanes for x in schedule.stages)
    return (schedule.teams + 1) // 2 * schedule.team * own * 8


@dataclass(frozen=True)
class Launch:
    """parts: blocks of a group region, else teams with work; chunks: parts a kept index has;
    span: rows (or groups) a part walks; grid: blocks."""

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
    keep = evaluate(product(a.extent for a in kept), sizes)
    reduced = max(1, total // keep)
    units = device.sm_count * blocks_per_sm
    if region.kind != "group":
        units *= schedule.teams
    chunks = max(1, min(reduced, units // keep))
    span = -(-reduced // chunks)
    chunks = -(-reduced // span)
    if together(region, schedule) and region.kind != "group":
        chunks = -(-chunks // schedule.teams) * schedule.teams  # those past the rows add zero
    parts = keep * chunks
    grid = parts if region.kind == "group" else -(-parts // schedule.teams)
    return Launch(parts, chunks, span, grid)
