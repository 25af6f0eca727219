"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone, so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megafuse.device import DeviceSpec
from megafuse.fusion.plan import RowRegion, Stage
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
    blocks a multiprocessor must be able to hold, which caps a thread's registers."""

    team: int
    teams: int
    stages: tuple[StageSchedule, ...]
    blocks: int = 1

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
    return Schedule(1, 1, tuple(stages))


def _registers(stage: Stage) -> float:
    """Registers a thread needs for each element it owns, roughly."""
    cols = set(stage.settled_cols())
    need = 3.0  # values in flight
    for node, varies in {
        (read.node, any(c.axes - cols for c in read.coords))
        for root in stage.roots for read in root.reads
        if any(c.axes & cols for c in read.coords)
    }:  # fmt: skip
        words = node.dtype.itemsize / 4
        need += words * (2 if varies else 1)
    need += sum(r.kind == "column" for r in stage.roots)
    return need


def cuda_schedules(region: RowRegion) -> Iterator[Schedule]:
    """Layouts in order of preference. The builder takes the first that the assembler fits into
    registers without spilling.

    Rows stream from memory, so what counts is loads in flight: first as many warps as registers
    allow for the preferred team, then fewer, then threads that hold less.
    """
    for budget in (110, 70, 40, 20):
        team = _team(region, budget)
        stages = tuple(_layout(stage, team, budget) for stage in region.stages)
        teams = _teams(region, team)
        for warps in (32, 24, 20, 16, 12, 8):
            for count in range(teams, 0, -1):
                threads = -(-team * count // 32) * 32
                blocks = warps * 32 // threads
                if blocks >= 1 and blocks * threads > (warps - 4) * 32:
                    yield Schedule(team, count, stages, blocks)
                if team < 32:
                    break
        yield Schedule(team, 1 if team >= 32 else teams, stages, 1)


def _lanes(stage: Stage) -> int:
    """The widest vector that divides the row and is 16 bytes of the stage's widest tensor."""
    n = columns_of(stage)
    widest = max(
        (read.node.dtype.itemsize for root in stage.roots for read in root.reads
         if any(c.axes & set(stage.settled_cols()) for c in read.coords)), default=4,
    )  # fmt: skip
    return next(v for v in (WIDEST, 4, 2, 1) if n % v == 0 and v * widest <= 16)


def _layout(stage: Stage, team: int, budget: int) -> StageSchedule:
    n, lanes = columns_of(stage), _lanes(stage)
    steps = -(-(n // lanes) // team)
    limit = max(lanes, int(budget / _registers(stage)))
    return StageSchedule(n, lanes, steps, steps * lanes > 2 * limit and team == 1024)


def _team(region: RowRegion, budget: int) -> int:
    """Threads a row: as few as hold it within `budget` registers, and none of them idle."""
    best: tuple[float, int] | None = None
    for team in [1, 2, 4, 8, 16, *range(32, 1025, 32)]:
        waste, fits = 0.0, True
        for stage in region.stages:
            lanes = _lanes(stage)
            vectors = columns_of(stage) // lanes
            steps = -(-vectors // team)
            fits &= steps * lanes <= max(lanes, int(budget / _registers(stage)))
            waste = max(waste, team * steps / vectors)
        if not fits and team < 1024:
            continue
        # Idle threads cost their share of the loads; a barrier costs more than a shuffle.
        price = waste + (0.0 if team <= 32 else 0.02) + 0.0005 * team
        if best is None or price < best[0]:
            best = (price, team)
    assert best is not None
    return best[1]


def _teams(region: RowRegion, team: int) -> int:
    if team < 32:
        return 128 // team
    if region.kind == "group":
        return max(1, min(15, 512 // team))
    # A block of column sums is one team: each team's sums are one more row of partials.
    columns = any(r.kind == "column" for r in region.roots)
    return 1 if columns or team > 64 else 128 // team


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
