"""What a layout takes of a machine: threads and vectors of a row, registers, shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from megafuse.codegen.schedule import Schedule, StageSchedule, columns_of
from megafuse.codegen.shelf import NARROWEST, pinnable, pinned_bytes, shelf_bytes, shelvable
from megafuse.codegen.turn import ROOM
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.fusion.walks import is_small
from megafuse.index import Coords, offset
from megafuse.ir import Node

PINNED = 8_192  # elements of a tensor that a group may keep unpacked in shared memory
WIDEST = 8  # lanes of a vector on the device: 16 bytes of a 16-bit type
LINE = 64  # elements of a row that neighbouring threads take in one step: a cache line of 16 bits
MOST_ELEMENTS = 64  # a thread with more walks its row in a loop and reads it again in each phase
DEEPEST = 4  # rows of a ring
ON_THE_WAY = 36_000  # bytes of next rows that hide the memory's latency


def team_of(region: RowRegion, elements: int) -> tuple[int, int]:
    """(threads a row, lanes of a vector at most): as few threads as hold the row with at most
    `elements` each, few of them idle, and vectors as wide as that allows."""
    best: tuple[float, int, int] | None = None
    stages = [(columns_of(stage), _lanes(stage)) for stage in region.stages]
    for team, widest in itertools.product([1, 2, 4, 8, 16, *range(32, 1025, 32)], (WIDEST, 4)):
        waste, fits = 0.0, True
        for columns, most in stages:
            lanes = min(most, widest)
            vectors = columns // lanes
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


def stage_layout(stage: Stage, team: int, widest: int = WIDEST) -> StageSchedule:
    n, lanes = columns_of(stage), min(_lanes(stage), widest)
    steps = -(-(n // lanes) // team)
    return StageSchedule(n, lanes, steps, steps * lanes > MOST_ELEMENTS)


def layouts_of(region: RowRegion, team: int, widest: int = WIDEST) -> tuple[StageSchedule, ...]:
    return tuple(stage_layout(stage, team, widest) for stage in region.stages)


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


def ring_depth(stage: Stage, teams: int) -> int:
    """Rows in a ring: enough bytes beyond the one that is worked on."""
    row = teams * columns_of(stage) * sum(d.itemsize for d, varies in _streams(stage) if varies)
    return min(DEEPEST, 1 + max(1, -(-ON_THE_WAY // max(row, 1))))


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


def registers_of(stage: Stage, schedule: Schedule) -> float:
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


def summed(region: RowRegion, stages: Sequence[StageSchedule]) -> int:
    """Registers of a thread for its column sums."""
    sums = sum(r.kind == "column" for r in region.roots)
    return max(sums * x.steps * x.lanes for x in stages)


def with_shelf(region: RowRegion, schedule: Schedule, pin: bool = True) -> Schedule | None:
    """The same layout with what is worth it on the shelf, small tensors unpacked beside it (pin),
    and the rings as deep as the room left allows; None where nothing fits."""
    plain = replace(schedule, depth=2, shelf=(), pinned=())
    room = ROOM if schedule.blocks == 1 else ROOM // schedule.blocks - 1024
    for item in shelvable(region):
        layout = schedule.stages[item.stage]
        narrow = not item.made and layout.lanes * item.node.dtype.itemsize < NARROWEST
        trial = replace(plain, shelf=(*plain.shelf, item))
        if not (narrow or layout.long) and shared_bytes(region, trial) <= room:
            plain = trial
    if not plain.shelf:
        return None
    for node, moves in pinnable(region, PINNED if pin else 0):
        trial = replace(plain, pinned=(*plain.pinned, node))
        if (moves or not plain.hold) and shared_bytes(region, trial) <= room:
            plain = trial
    deeper = (replace(plain, depth=d) for d in range(schedule.depth, 1, -1))
    return next((s for s in deeper if shared_bytes(region, s) <= room), plain)


def shared_bytes(region: RowRegion, schedule: Schedule) -> int:
    """Bytes of the shelf, and of the rings of the stage that has most of them."""
    served = _served(region, schedule)
    pairs = zip(region.stages, schedule.stages, strict=True)
    rings = max(_ring_bytes(stage, layout, schedule, served) for stage, layout in pairs)
    return shelf_bytes(schedule.shelf) + pinned_bytes(schedule.pinned) + rings


def _served(region: RowRegion, schedule: Schedule) -> set[tuple[Node, Coords]]:
    """Reads that find their tensor on the shelf."""
    return {
        (read.node, read.coords)
        for k, stage in enumerate(region.stages) for r in stage.roots for read in r.reads
        for item in schedule.shelf
        if item.node is read.node
        and item.serves(k, offset(read.coords, read.node.room), region)
    }  # fmt: skip


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
