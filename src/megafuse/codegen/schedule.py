"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone, so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megafuse.device import DeviceSpec
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.ir import evaluate, product

WIDEST = 8  # lanes of a vector on the device: 16 bytes of a 16-bit type
HOST_LANES = 16
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
    """team: threads that share a row; teams: of a block; stages: one layout each."""

    team: int
    teams: int
    stages: tuple[StageSchedule, ...]

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


def cuda_schedule(region: RowRegion) -> Schedule:
    """Few enough elements a thread that nothing spills, and no thread without a vector."""
    widths, limits = [], []
    for stage in region.stages:
        n = columns_of(stage)
        lanes = next(v for v in (WIDEST, 4, 2, 1) if n % v == 0)
        widths.append((n, lanes))
        limits.append(max(lanes, int(110 / _registers(stage))))
    columns = sum(r.kind == "column" for r in region.roots)
    best: tuple[float, int] | None = None
    for team in [1, 2, 4, 8, 16, *range(32, 1025, 32)]:
        waste, fits, steps_all = 0.0, True, 0
        for (n, lanes), limit in zip(widths, limits, strict=True):
            vectors = n // lanes
            steps = -(-vectors // team)
            fits &= steps * lanes <= limit
            waste = max(waste, team * steps / vectors)
            steps_all += steps
        if not fits and team < 1024:
            continue
        # Idle threads cost their share of the loads; a barrier costs more than a shuffle.
        price = waste + (0.0 if team <= 32 else 0.02) + 0.0005 * team
        if best is None or price < best[0]:
            best = (price, team)
    assert best is not None
    team = best[1]
    stages = []
    for (n, lanes), limit in zip(widths, limits, strict=True):
        steps = -(-(n // lanes) // team)
        stages.append(StageSchedule(n, lanes, steps, steps * lanes > 2 * limit))
    if team < 32:
        teams = 128 // team
    elif region.kind == "group":
        teams = max(1, min(15, 512 // team))
    else:
        teams = 1 if columns or team > 64 else 128 // team
    return Schedule(team, teams, tuple(stages))


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
