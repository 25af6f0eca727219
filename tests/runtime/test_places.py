"""Places in shared memory: buffers that live at the same time do not meet, and little is wasted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megafuse.runtime.places import Life, busiest, held, pack, runs

MOMENTS = 12


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    found = []
    for i in range(draw(st.integers(0, 12))):
        first, last = sorted((draw(st.integers(0, MOMENTS - 1)), draw(st.integers(0, MOMENTS - 1))))
        if draw(st.booleans()):
            last = MOMENTS  # outlives the call
        found.append(Life(i, 256 * draw(st.integers(0, 9)), first, last, draw(st.booleans())))
    return found


def at(lives: Sequence[Life], moment: int) -> list[Life]:
    return [x for x in lives if x.first <= moment <= x.last]


@given(lives())
def test_no_two_that_live_at_the_same_time_meet(lives: list[Life]) -> None:
    offsets, total = pack(lives)
    assert set(offsets) == {x.buffer for x in lives}
    for moment in range(MOMENTS):
        taken = sorted((offsets[x.buffer], x.nbytes) for x in at(lives, moment) if x.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken))
    assert all(o >= 0 and o + x.nbytes <= total for x in lives for o in [offsets[x.buffer]])
    assert busiest(lives) <= total <= sum(x.nbytes for x in lives)
    assert pack(lives) == (offsets, total)


@given(lives())
def test_the_most_that_is_needed_at_a_moment(lives: list[Life]) -> None:
    each = [sum(x.nbytes for x in at(lives, m)) for m in range(MOMENTS + 1)]
    assert busiest(lives) == max(each)
    assert [held(lives, range(m, m + 1)) for m in range(MOMENTS + 1)] == each


def test_little_is_wasted() -> None:
    draw = random.Random(0)
    ratios = []
    for _ in range(100):
        lives = []
        for i in range(40):
            first = draw.randrange(30)
            nbytes = 256 * round(2 ** draw.uniform(0, 12))
            lives.append(Life(i, nbytes, first, first + round(draw.expovariate(0.3))))
        ratios.append(pack(lives)[1] / busiest(lives))
    assert max(ratios) < 1.25 and sum(ratios) / len(ratios) < 1.03


@given(lives(), st.floats(1, 2))
def test_runs_hold_no_more_than_allowed(lives: list[Life], slack: float) -> None:
    most = int(slack * busiest(lives))
    found = runs(lives, MOMENTS, most)
    assert [m for run in found for m in run] == list(range(MOMENTS))
    assert all(held(lives, run) <= most for run in found)
    for run in found:  # none could have been longer
        longer = (range(run.start, end) for end in range(run.stop + 1, MOMENTS + 1))
        assert not any(held(lives, x) <= most for x in longer)


def test_a_chain_of_temporaries_takes_two_places_and_one_run() -> None:
    chain = [Life(i, 1024, i, i + 1) for i in range(9)]
    assert pack(chain)[1] == 2048
    assert runs(chain, 10, 2048) == [range(10)]
    # What may not share is dropped between runs.
    alone = [Life(i, 1024, i, i + 1, shares=False) for i in range(9)]
    singles = [range(i, i + 1) for i in range(2, 8)]
    assert runs(alone, 10, 2048) == [range(2), *singles, range(8, 10)]
