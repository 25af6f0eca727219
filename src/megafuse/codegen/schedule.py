"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone, so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megafuse.device import DeviceSpec
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.index import offset
from megafuse.ir import evaluate, product

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
    the streamed tensors on their way in shared memory (0: registers); ahead: the next row's loads
    are issued before this row's arithmetic; hold: parameters stay in registers from row to row;
    keep: so do a row's intermediate values from phase to phase, where computing them again costs
    more; shared_sums: column sums live in shared memory; in_turn: parts take rows in turn, so that
    all of them read one moving window of memory, instead of a span of rows each."""

    team: int
    teams: int
    stages: tuple[StageSchedule, ...]
    blocks: int = 1
    depth: int = 0
    ahead: bool = True
    hold: bool = True
    keep: bool = False
    shared_sums: bool = False
    in_turn: bool = True

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
    return Schedule(1, 1, tuple(stages), in_turn=False)


ELEMENTS = (40, 24, 8, 4, 2, 1)
"""Elements of a row a thread may own, most first: fewer threads meet at fewer barriers."""

FEW = 8  # elements of a thread, one vector of them

# (depth, ahead, hold), in the order tried
ROW_WAYS = ((0, True, False), (2, True, False), (0, False, False), (0, True, True))
GROUP_WAYS = ((2, True, False), (0, True, False), (0, False, False), (0, True, True))
COLUMN_WAYS = ((2, True, True), (2, True, False), (0, True, True))
NARROW_COLUMN_WAYS = ((0, True, True), (2, True, True), (2, True, False), (0, True, False))

MANY_ROWS = 8_192
"""From here on there are rows enough for every multiprocessor whatever the layout."""

THREADS = 256  # of a block, where a row needs fewer
FEWEST_WARPS = 8  # on a multiprocessor, where there are rows enough for them
REGISTERS = 330  # a layout that needs more by our estimate is not worth compiling
SHARED = 200_000  # bytes of rings a block may have


def cuda_schedules(region: RowRegion, rows: int) -> Iterator[Schedule]:
    """Layouts in order of preference. The builder takes the first that the assembler fits into
    registers without spilling. rows: how many there are, roughly.

    The order is what `benchmarks/rows.py --sweep` found on an H200: what costs time is the
    instructions and barriers of a row, not the number of loads under way. So few threads share a
    row, each with many elements; parameters are read again from the cache, and where column sums
    or groups fill the registers the streams go through shared memory.
    """
    columns = any(r.kind == "column" for r in region.roots)
    for elements in ELEMENTS:
        if rows < MANY_ROWS and elements > FEW:
            continue  # few rows: threads are what there is plenty of
        ways: tuple[tuple[int, bool, bool], ...]
        if region.kind == "group":
            ways = GROUP_WAYS
        elif columns:
            ways = COLUMN_WAYS if elements > FEW else NARROW_COLUMN_WAYS
        else:
            ways = ROW_WAYS
        team = _team(region, elements)
        stages = tuple(_layout(stage, team) for stage in region.stages)
        teams = max(1, (THREADS if rows >= MANY_ROWS else 64) // team)
        if region.kind == "group":
            teams = min(teams, 4)
        for depth, ahead, hold in ways:
            schedule = Schedule(team, teams, stages, 1, depth, ahead, hold)
            fits = all(
                _registers(s, schedule) * x.steps * x.lanes + 40 <= REGISTERS
                and _ring_bytes(s, schedule) <= SHARED
                for s, x in zip(region.stages, stages, strict=True)
            )
            if fits or elements == ELEMENTS[-1]:
                yield schedule


def _lanes(stage: Stage) -> int:
    """The widest vector that divides the row and is 16 bytes of the stage's widest tensor."""
    n = columns_of(stage)
    cols = stage.settled_cols()
    widest = max(
        (read.node.dtype.itemsize for root in stage.roots for read in root.reads
         if cols and offset(read.coords, read.node.shape).coefficient(cols[-1]) == 1), default=4,
    )  # fmt: skip
    return next(v for v in (WIDEST, 4, 2, 1) if n % v == 0 and v * widest <= 16)


def _streams(stage: Stage) -> list[tuple[torch.dtype, bool]]:
    """(dtype, whether it changes from row to row) of every tensor read along the row."""
    cols = set(stage.settled_cols())
    seen = {
        (read.node, read.coords): any(c.axes - cols for c in read.coords)
        for root in stage.roots for read in root.reads
        if any(c.axes & cols for c in read.coords)
    }  # fmt: skip
    return [(node.dtype, varies) for (node, _), varies in seen.items()]


def _registers(stage: Stage, schedule: Schedule) -> float:
    """Registers a thread needs for each element it owns, roughly."""
    need = 3.0  # values in flight
    for dtype, varies in _streams(stage):
        words = dtype.itemsize / 4
        if not varies:
            need += words if schedule.hold else 0
        elif schedule.depth == 0:
            need += words * (2 if schedule.ahead else 1)
    return need + sum(r.kind == "column" for r in stage.roots)


def _ring_bytes(stage: Stage, schedule: Schedule) -> int:
    moving = sum(dtype.itemsize for dtype, varies in _streams(stage) if varies)
    return schedule.depth * schedule.teams * columns_of(stage) * moving


def _layout(stage: Stage, team: int) -> StageSchedule:
    n, lanes = columns_of(stage), _lanes(stage)
    steps = -(-(n // lanes) // team)
    return StageSchedule(n, lanes, steps, steps * lanes > MOST_ELEMENTS)


MOST_ELEMENTS = 64  # a thread with more walks its row in a loop and reads it again in each phase


def _team(region: RowRegion, elements: int) -> int:
    """Threads a row: as few as hold it with at most `elements` each, and few of them idle."""
    best: tuple[float, int] | None = None
    for team in [1, 2, 4, 8, 16, *range(32, 1025, 32)]:
        waste, fits = 0.0, True
        for stage in region.stages:
            lanes = _lanes(stage)
            vectors = columns_of(stage) // lanes
            steps = -(-vectors // team)
            fits &= steps * lanes <= max(lanes, elements)
            waste = max(waste, team * steps / vectors)
        if not fits and team < 512:
            continue
        price = waste + 0.003 * team + (0.0 if fits else 10.0)
        if best is None or price < best[0]:
            best = (price, team)
    assert best is not None
    return best[1]


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
    kept: list,  # type: ignore[type-arg]
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
    parts = keep * chunks
    grid = parts if region.kind == "group" else -(-parts // schedule.teams)
    return Launch(parts, chunks, span, grid)
