"""Two row regions become one, where a rule allows it."""

from __future__ import annotations

from dataclasses import replace

from megafuse.fusion import cost
from megafuse.fusion.align import Mismatch, Pair
from megafuse.fusion.plan import Read, RowRegion, Stage
from megafuse.fusion.rules import group, same_rows


def related(x: RowRegion, y: RowRegion) -> bool:
    """Whether the two share a value or a large read."""
    return any(_common(a, b) for a in x.stages for b in y.stages)


def merged_regions(x: RowRegion, y: RowRegion) -> RowRegion:
    """Both as one region, by the first rule that allows it: x's later stages first, then a stage of
    its own. Raises Mismatch with the reason."""
    if len(x.stages) > 1 and len(y.stages) > 1:
        raise Mismatch("both already hold rows that depend on each other")
    if len(y.stages) > 1:
        x, y = y, x
    stage = y.stages[0]
    reason = Mismatch("they have no value in common")
    across: RowRegion | None = None
    for k in reversed(range(len(x.stages))):
        mine = x.stages[k]
        pairs = _common(mine, stage)
        if not pairs:
            continue
        a, b = _copy(mine), _copy(stage)
        try:
            union = same_rows.merge(a, b, pairs)
            cost.check_size(union)
            trial = RowRegion([*map(_copy, x.stages)], list(x.group))
            trial.stages[k] = union
            if len(x.stages) > 1:
                trial.group = [g for g in x.group if g in union.axes]
                if len(trial.group) != len(x.group):
                    raise Mismatch("the group's loop would have to be split")
                if not group.within_group(trial, union, k):
                    raise Mismatch("it reads other groups of an earlier stage")
            if same_rows.scattered(mine) or not same_rows.scattered(union):
                return trial
            across = across or trial
        except Mismatch as why:
            reason = why
    if _reads_only_from(x, stage):
        trial = RowRegion([*map(_copy, x.stages)], list(x.group))
        try:
            group.add_stage(trial, _copy(stage))
            return trial
        except Mismatch as why:
            reason = why
    if across is not None:
        return across
    raise reason


def _reads_only_from(x: RowRegion, stage: Stage) -> bool:
    made = group.made_in(x)
    own = same_rows.produced(stage)
    reads_x = any(r.node in made for root in stage.roots for r in root.reads)
    x_reads = any(r.node in own for s in x.stages for root in s.roots for r in root.reads)
    return reads_x and not x_reads


def _common(a: Stage, b: Stage) -> list[Pair]:
    """What ties two stages: a value one makes for the other, else the largest tensor both read."""
    return same_rows.pairs_between(a, b) or same_rows.shared_loads(a, b)


def _copy(stage: Stage) -> Stage:
    roots = [replace(r, reads=[Read(x.node, x.coords) for x in r.reads]) for r in stage.roots]
    return Stage(list(stage.axes), None if stage.cols is None else list(stage.cols), roots)
