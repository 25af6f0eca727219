"""Which layouts of a row region are tried on a device, the most promising first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megafuse.codegen.fit import (
    DEEPEST,
    PINNED,
    layouts_of,
    registers_of,
    ring_depth,
    shared_bytes,
    summed,
    team_of,
    with_shelf,
)
from megafuse.codegen.schedule import Schedule
from megafuse.codegen.shelf import pinnable
from megafuse.codegen.turn import ROOM, Tile, tile_for
from megafuse.fusion.plan import RowRegion, Stage
from megafuse.fusion.walks import kept_axes
from megafuse.ir import product

ELEMENTS = (40, 24, 8, 4, 2, 1)
"""Elements of a row a thread may own, most first: fewer threads meet at fewer barriers."""
FEW = 8  # elements of a thread, one vector of them


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
LONE = 192  # threads of a row from which on a block has but one
CROWD = 20  # warps on a multiprocessor then
TILED_WAYS = (
    (4, 24, True), (3, 24, True), (3, 8, True), (2, 24, True), (2, 24, False), (2, 8, True),
    (2, 8, False), (1, 24, False), (1, 8, False), (1, 40, False),
)  # fmt: skip
"""Blocks that turn tiles on a multiprocessor, elements of a thread, whether parameters are held."""
FEWEST_WARPS = 8  # on a multiprocessor, where there are rows enough for them
REGISTERS = 330  # a layout that needs more by our estimate is not worth compiling
SHARED = 200_000  # bytes of rings a block may have
SUMS, HELD = 100, 80  # registers of a thread for column sums, at most; beside held parameters
PAIR = 64  # threads of a row that meet two warps at a time

CROWDED = 384  # of a group's block that has a multiprocessor to itself and sums no columns
GROUP_THREADS = 128  # of a group's block, or four teams: it has few rows at a time
REGISTERS_OF_SM = 65_536
BLOCKS = (4, 3, 2)  # of a group's small blocks on a multiprocessor
SPANS = 32
"""Kept indices from which on a part takes its rows one after the other: each index has so few parts
that what they read together is no window."""


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
    teams_of = {e: team_of(region, e) for e in sizes}
    order = [(e, w) for e in sizes for w in ways]
    if columns:
        order = _column_order(teams_of, ways)
    kept = product(a.extent for a in kept_axes(region))
    in_turn = group or not (isinstance(kept, int) and kept >= SPANS)
    for elements, way in order:
        team, widest = teams_of[elements]
        stages = layouts_of(region, team, widest)
        if many and elements > FEW and summed(region, stages) > (HELD if way.hold else SUMS):
            continue
        teams = max(1, (THREADS if many else 64) // team)
        if group:
            teams = min(teams, max(4, GROUP_THREADS // team))
        depth = max(ring_depth(s, teams) for s in region.stages) if way.ring else 0
        schedule = Schedule(team, teams, stages, 1, depth, way.lazy, way.ahead, way.hold, many,
                            in_turn=in_turn)  # fmt: skip
        if group and many and way.ring:
            yield from _shelved(region, schedule, columns)
        if shared_bytes(region, schedule) > SHARED:
            continue
        if group and not many:
            yield from _together(region, schedule)
        fits = all(
            registers_of(s, schedule) * x.steps * x.lanes + 40 <= REGISTERS
            for s, x in zip(region.stages, stages, strict=True)
        )
        if many and not group and not columns and teams == 1 and team >= LONE:
            yield _crowded(region, schedule)
        if fits or elements == ELEMENTS[-1]:
            yield schedule


def _column_order(
    teams_of: Mapping[int, tuple[int, int]], ways: Sequence[_Way]
) -> list[tuple[int, _Way]]:
    """Held parameters count for more than few threads; but two warps that read them again do better
    than four that hold them."""
    order = [(e, w) for w in ways for e in teams_of]
    if ways is COLUMN_WAYS:
        pairs = [(e, w) for e, w in order if teams_of[e][0] <= PAIR and w in ways[:2]]
        order = [*pairs, *(x for x in order if x not in pairs)]
    return order


def _tiled(region: RowRegion, tile: Tile) -> Iterator[Schedule]:
    """Layouts of blocks that turn tiles: rather several blocks on a multiprocessor, of which some
    load while others compute, than few threads a row."""
    tried: list[Schedule] = []
    for blocks, elements, hold in TILED_WAYS:
        team, widest = team_of(region, elements)
        stages = layouts_of(region, team, widest)
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
    while blocks > 1 and blocks * (shared_bytes(region, schedule) + 1024) > ROOM:
        blocks -= 1
    return replace(schedule, blocks=blocks)


def _shelved(region: RowRegion, schedule: Schedule, columns: bool) -> Iterator[Schedule]:
    """The same with a shelf. Rather several small blocks on a multiprocessor, of which some bring
    their rows in while others compute. A shelf as large as a multiprocessor leaves room for one
    block, which then has all the threads: with column sums, whose registers each of them needs,
    half as many."""
    schedule = replace(schedule, depth=DEEPEST)
    small = replace(schedule, teams=max(1, GROUP_THREADS // schedule.team))
    whole = with_shelf(region, small, pin=False)
    for blocks in BLOCKS if schedule.hold else ():
        found = with_shelf(region, replace(small, blocks=blocks), pin=False)
        if found is not None and whole is not None and found.shelf == whole.shelf:
            yield found
    fewest = min(_group_rows(region, s) for s in region.stages)
    wide = replace(schedule, stages=layouts_of(region, schedule.team))
    crowded = CROWDED // schedule.team
    most = replace(schedule, teams=max(schedule.teams, THREADS // schedule.team))
    found = None
    if schedule.hold and not columns and fewest >= 2 * crowded:
        found = with_shelf(region, replace(wide, teams=crowded), pin=False)
    elif columns and not any(moves for _, moves in pinnable(region, PINNED)):
        found = with_shelf(region, most, pin=False)
    elif columns:  # which need the registers of parameters: those are unpacked in shared memory
        found = with_shelf(region, replace(wide, teams=most.teams, hold=False))
    if found is not None:
        yield found
    if (found := with_shelf(region, most)) is not None:
        yield found


def _together(region: RowRegion, schedule: Schedule) -> Iterator[Schedule]:
    """The same with many threads, a warp a row or as it is: a group is one block's, and few groups
    leave most multiprocessors idle, so that what counts is how long a group takes."""
    fewest = min(_group_rows(region, s) for s in region.stages)
    warps = replace(schedule, team=32, stages=layouts_of(region, 32))
    for form, threads in itertools.product((warps, schedule), (2 * THREADS, CROWDED, THREADS)):
        teams = min(threads // form.team, fewest)
        room = min(255, REGISTERS_OF_SM // max(1, teams * form.team))
        if teams * form.team > schedule.threads and not any(x.long for x in form.stages) and all(
            registers_of(s, replace(form, hold=False)) * x.steps * x.lanes + 40 <= room
            for s, x in zip(region.stages, form.stages, strict=True)
        ):  # fmt: skip
            yield replace(form, teams=teams, hold=False)


def _group_rows(region: RowRegion, stage: Stage) -> int:
    rows = product(a.extent for a in stage.rows() if a not in region.group)
    return rows if isinstance(rows, int) else 0
