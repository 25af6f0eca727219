"""Rows that depend on each other inside a group: one block owns the group and runs both stages.

Token mixing couples the T rows of a sample: the second stage reads rows of the first that are not
its own, but never those of another sample. Legal when some row axes (the group) index both stages
alike in every such read, a group is small enough to stay near one block, and no sum over rows
would have to be kept apart for rows inside a group.
"""

from __future__ import annotations

from megafuse.fusion.align import Mismatch, renaming
from megafuse.fusion.plan import Root, RowRegion, Stage
from megafuse.fusion.rules.same_rows import produced
from megafuse.index import Axis
from megafuse.ir import product

GROUP_ELEMENTS = 1 << 19
"""Elements of one group at most: 1 MiB of bf16, which L2 holds for every block at once."""


def made_in(region: RowRegion) -> dict[object, tuple[int, Root]]:
    return {node: (k, r) for k, s in enumerate(region.stages) for node, r in produced(s).items()}


def add_stage(region: RowRegion, stage: Stage) -> None:
    """Append `stage` to `region`, making it a group region. Raises Mismatch with the reason."""
    made = made_in(region)
    _refuse_unfinished(region, stage)
    cols = set(stage.settled_cols())
    shared: dict[Axis, Axis] | None = None
    for root in stage.roots:
        for read in root.reads:
            if read.node not in made:
                continue
            k, source = made[read.node]
            rows = set(region.stages[k].rows())
            mates: dict[Axis, Axis] = {}
            for theirs, ours in zip(source.out(), read.coords, strict=True):
                if len(theirs.terms) == len(ours.terms) == 1 and theirs.const == ours.const == 0:
                    (a, ca), (b, cb) = next(iter(theirs.terms)), next(iter(ours.terms))
                    if ca == cb and a.extent == b.extent and a in rows and b not in cols:
                        mates[b] = a
            shared = mates if shared is None else {
                b: a for b, a in shared.items() if mates.get(b) is a
            }  # fmt: skip
    if region.group:
        shared = {b: a for b, a in (shared or {}).items() if a in region.group}
    if not shared:
        raise Mismatch("it reads rows of every other group, so all rows must be finished first")
    group = [a for a in region.stages[0].axes if a in shared.values()]
    inside = product(
        a.extent for a in max((s.axes for s in region.stages), key=len) if a not in group
    )
    if not isinstance(inside, int) or inside > GROUP_ELEMENTS:
        raise Mismatch(f"a group of {inside} elements is too large for one block")
    for s in [*region.stages, stage]:
        names = {b if s is stage else a for b, a in shared.items()}
        if not _kept_apart(s, set(s.settled_cols())) <= names:
            raise Mismatch("a sum over rows is kept apart for rows inside the group")
    stage.cols = stage.settled_cols()
    for s in region.stages:
        s.cols = s.settled_cols()
    stage.rename(renaming(shared))
    region.stages.append(stage)
    region.group = group


def _kept_apart(stage: Stage, cols: set[Axis]) -> set[Axis]:
    """Row axes that a sum over rows does not sum over."""
    return {a for root in stage.roots if root.kind == "column"
            for a in root.axes if a not in root.reduced and a not in cols}  # fmt: skip


def _refuse_unfinished(region: RowRegion, stage: Stage) -> None:
    """A stage cannot read what is complete only after the whole launch: column sums, and
    concatenations of which this launch may write only a part."""
    unfinished = {
        r.target for r in region.roots
        if r.kind == "column" or (r.kind == "store" and r.target is not r.node)
    }  # fmt: skip
    for root in stage.roots:
        for read in root.reads:
            if read.node in unfinished:
                raise Mismatch(
                    f"{read.node.origin.op} is complete only when every row has been walked"
                )


def within_group(region: RowRegion, stage: Stage, k: int) -> bool:
    """Whether `stage` (axes already those of stage k) reads earlier stages of its group only, and
    keeps no sum over rows apart for rows inside the group."""
    if not _kept_apart(stage, set(region.stages[k].settled_cols())) <= set(region.group):
        return False
    for other in region.stages:
        if other is not stage:
            _refuse_unfinished(RowRegion([other]), stage)
            _refuse_unfinished(RowRegion([stage]), other)
    made = made_in(region)
    for root in stage.roots:
        for read in root.reads:
            if read.node in made and made[read.node][0] != k:
                j, source = made[read.node]
                if j > k:
                    return False
                for theirs, ours in zip(source.out(), read.coords, strict=True):
                    if (theirs.axes & set(region.group)) and theirs != ours:
                        return False
    return True
