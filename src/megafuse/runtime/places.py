"""Where buffers lie that need not exist at the same time, and when memory for them is asked for.

Moments are the regions of one direction in order. Kernels follow one another on a stream and wait
for their predecessors before they touch memory, so a place is free again as soon as the region that
uses it last has been launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Life:
    """A buffer of `nbytes`, needed from moment `first` to moment `last`, both included. shares:
    others may lie in its place before and after."""

    buffer: Any
    nbytes: int
    first: int
    last: int
    shares: bool = True


def busiest(lives: Sequence[Life]) -> int:
    """The most bytes that are needed at one moment."""
    change: defaultdict[int, int] = defaultdict(int)
    for life in lives:
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return max(accumulate(change[moment] for moment in sorted(change)), default=0)


def pack(lives: Sequence[Life]) -> tuple[Mapping[Any, int], int]:
    """Offsets at which no two buffers meet that live at the same time, and the bytes all of them
    take: not below `busiest`, and seldom above. The same for the same lives."""
    offsets: dict[Any, int] = {}
    placed: list[tuple[int, int, Life]] = []  # from, to
    for life in sorted(lives, key=lambda x: (-x.nbytes, x.first)):  # small ones fit between
        near = [p for p in placed if p[2].first <= life.last and life.first <= p[2].last]
        gaps, end = [], 0
        for start, stop, _ in sorted(near, key=lambda p: p[:2]):
            if start - end >= life.nbytes:
                gaps.append((start - end, end))
            end = max(end, stop)
        at = min(gaps)[1] if gaps else end
        offsets[life.buffer] = at
        placed.append((at, at + life.nbytes, life))
    return offsets, max((stop for _, stop, _ in placed), default=0)


def held(lives: Sequence[Life], run: range) -> int:
    """Bytes that are taken while `run` is launched in one go: all that is needed at any moment of
    it, though what both begins and ends in it may share."""
    inside, across = [], 0
    for life in lives:
        if life.shares and life.first >= run.start and life.last < run.stop:
            inside.append(life)
        elif life.first < run.stop and life.last >= run.start:
            across += life.nbytes
    return across + busiest(inside)


def runs(lives: Sequence[Life], moments: int, most: int) -> list[range]:
    """All moments in runs that hold at most `most` bytes each, the first as long as it can be, then
    the second, and so on; a moment that needs more is a run by itself."""
    found, begin = list[range](), 0
    while begin < moments:
        end = moments
        while end > begin + 1 and held(lives, range(begin, end)) > most:
            end -= 1
        found.append(range(begin, end))
        begin = end
    return found
