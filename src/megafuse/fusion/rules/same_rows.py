"""Two walks over the same rows become one: a value one makes is the other's in registers.

Legal when, under one renaming of axes, every value of x that y reads is read at the element or row
x computes it for, and rows and columns mean the same to all roots.
"""

from __future__ import annotations

from megafuse.fusion.align import Mismatch, Pair, renaming, unify
from megafuse.fusion.plan import Root, Stage
from megafuse.fusion.rules import roles
from megafuse.index import Affine, Axis, Coords, magnitude, offset
from megafuse.ir import Dim, Node, as_dim, product


def produced(stage: Stage) -> dict[Node, Root]:
    """Values another root could take from this stage in registers."""
    made = {r.node: r for r in stage.roots if r.kind == "store" and r.target is r.node}
    return made | {r.node: r for r in stage.roots if r.kind == "row"}


def pairs_between(x: Stage, y: Stage) -> list[Pair]:
    """(x's coordinates, y's coordinates) of every value one stage reads from the other."""
    pairs: list[Pair] = []
    made_x, made_y = produced(x), produced(y)
    for root in y.roots:
        pairs += [(made_x[r.node].out(), r.coords) for r in root.reads if r.node in made_x]
    for root in x.roots:
        pairs += [(r.coords, made_y[r.node].out()) for r in root.reads if r.node in made_y]
    return pairs


def shared_loads(x: Stage, y: Stage) -> list[Pair]:
    """The largest read that both make: what makes siblings worth one walk."""
    best: list[Pair] = []
    most = 0.0
    mine: dict[Node, list[Coords]] = {}
    for root in x.roots:
        for read in root.reads:
            mine.setdefault(read.node, []).append(read.coords)
    for root in y.roots:
        for read in root.reads:
            for coords in mine.get(read.node, ()):
                if any(a.const != b.const for a, b in zip(coords, read.coords, strict=True)):
                    continue  # other halves of one tensor, say
                size = _elements(read.coords)
                if size > most and size == _elements(coords) and set(y.axes) <= _axes(read.coords):
                    best, most = [(coords, read.coords)], size
    return best


def scattered(stage: Stage) -> bool:
    """Whether the stage writes its rows in pieces, to which it adds what it reads in other orders
    from rows that are not at hand yet. As a stage of its own, once all rows of the group are, the
    same costs less: rows are then written whole."""
    places: dict[Node, set[frozenset[tuple[Axis, Dim]]]] = {}
    for root in stage.roots:
        for read in root.reads:
            terms = offset(read.coords, read.node.room).terms
            if len(terms) > 1:
                places.setdefault(read.node, set()).add(terms)
    return any(len(found) > 1 for found in places.values()) and any(
        root.kind == "store" and _in_pieces(offset(root.where, root.target.room), stage)
        for root in stage.roots
    )


def _in_pieces(at: Affine, stage: Stage) -> bool:
    """Whether the columns of a row lie in runs that are apart from each other."""
    step: Dim = 1
    for axis in reversed(stage.settled_cols()):
        if at.coefficient(axis) != step:
            return bool(step != 1)
        step = as_dim(step * axis.extent)
    return False


def _elements(coords: Coords) -> float:
    return magnitude(product(a.extent for a in _axes(coords)))


def _axes(coords: Coords) -> set[Axis]:
    return set().union(*(c.axes for c in coords)) if coords else set()


def merge(x: Stage, y: Stage, pairs: list[Pair]) -> Stage:
    """The union of both stages over x's axes. Raises Mismatch with the reason."""
    bound = unify(x, y, pairs)
    y.rename(renaming(bound))
    made_y = produced(y)
    for stage, other in ((x, made_y), (y, produced(x))):
        for root in stage.roots:
            for read in root.reads:
                if read.node in other and read.coords != other[read.node].out():
                    names = root.node.origin.op, read.node.origin.op
                    raise Mismatch(f"{names[0]} reads {names[1]} of other rows")
    written = {r.target for r in x.roots + y.roots if r.kind == "column" or r.target is not r.node}
    for root in x.roots + y.roots:
        for read in root.reads:
            if read.node in written:
                name = read.node.origin.op
                raise Mismatch(f"{name} is complete only when every row has been walked")
    axes = x.axes + [a for a in y.axes if a not in x.axes]
    cols = roles.merged_cols(x, y)
    union = Stage(axes, cols, x.roots + y.roots)
    problem = roles.disagreement(union.roots, axes, union.settled_cols())
    if problem:
        raise Mismatch(problem)
    return union
