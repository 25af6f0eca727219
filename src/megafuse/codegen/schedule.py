"""How a row region is laid over a machine: lanes, threads a row, teams a block, parts.

The schedule changes speed and the order of sums, never what is computed. It is chosen from shapes
alone (`candidates.py`), so that two processes on one machine compute bitwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafuse.codegen.shelf import Shelved
from megafuse.codegen.turn import Tile
from megafuse.device import DeviceSpec
from megafuse.errors import InputError
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.fusion.walks import kept_axes
from megafuse.index import Axis
from megafuse.ir import Node, evaluate, product

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
    one moving window of memory, instead of a span of rows each, which takes fewer instructions;
    shelf: what a group keeps in shared memory from stage to stage; tile: rows that a block takes
    together, to turn what lies across them; pinned: small tensors a group keeps in shared memory as
    float32 throughout; early: a ring that brings one row at a time begins with the next as soon as
    this one is in registers; once: norms take fewer reductions and instructions, see norms.py."""

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

MOST_ROWS = (1 << 31) - (1 << 24)
"""Of one kept index in one call: kernels count them in 32 bits, and look ahead. (Groups and tiles
are counted in 64.)"""

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
    """One wave of blocks, each with an equal share of the rows (or groups).

    Raises InputError where there are more rows than kernels count."""
    outer = region.group if region.kind == "group" else region.stages[0].rows()
    total = evaluate(product(a.extent for a in outer), sizes)
    if schedule.tile is not None:
        total = schedule.tile.count(region, sizes)
    keep = evaluate(product(a.extent for a in kept), sizes)
    reduced = max(1, total // keep)
    units = device.sm_count * blocks_per_sm
    blocks = by_block(region, schedule)
    if not blocks and reduced > MOST_ROWS:
        origin = region.stages[0].roots[0].node.origin
        raise InputError(
            f"{origin}: {reduced:,} rows in one call, of which a kernel counts {MOST_ROWS:,}: "
            "split the batch"
        )
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
