"""Do two walks visit the same rows? Finding the renaming of axes that makes their reads agree."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.fusion.plan import Stage
from megafuse.index import Affine, Axis, Coords, NeedSplit, of, quotient, split_axis
from megafuse.ir import as_dim


class Mismatch(Exception):
    """The two walks differ; the message is a clause a user understands."""


Pair = tuple[Coords, Coords]


def unify(x: Stage, y: Stage, pairs: Sequence[Pair]) -> dict[Axis, Axis]:
    """The renaming of y's axes to x's under which each pair of coordinates (x's, y's) is equal and
    the remaining axes correspond in order. Splits axes of either stage where one is finer.

    Raises Mismatch.
    """
    while True:
        try:
            return _unify(x, y, pairs)
        except NeedSplit as need:
            stage = x if need.axis in x.axes else y
            _, _, replacement = split_axis(need.axis, need.inner)
            renaming = {need.axis: replacement}
            stage.rename(renaming)

            def renamed(coords: Coords, by: dict[Axis, Affine] = renaming) -> Coords:
                return tuple(c.substitute(by) for c in coords)

            pairs = [(renamed(a), b) if stage is x else (a, renamed(b)) for a, b in pairs]


def _unify(x: Stage, y: Stage, pairs: Sequence[Pair]) -> dict[Axis, Axis]:
    bound: dict[Axis, Axis] = {}
    for x_coords, y_coords in pairs:
        for fx, fy in zip(x_coords, y_coords, strict=True):
            _bind_forms(fx, fy, bound)
    taken = set(bound.values())
    left_x = [a for a in x.axes if a not in taken]
    left_y = [a for a in y.axes if a not in bound]
    while left_x and left_y:
        a, b = left_x.pop(0), left_y.pop(0)
        _bind(b, a, bound, 1)
    return bound


def _bind_forms(fx: Affine, fy: Affine, bound: dict[Axis, Axis]) -> None:
    if as_dim(fx.const - fy.const) != 0:
        raise Mismatch("the two read elements at different offsets")
    by_coefficient = {c: a for a, c in fx.terms}
    if len(by_coefficient) != len(fx.terms):
        raise Mismatch("an element is addressed by two loops with one stride")
    matched = 0
    for axis, coefficient in fy.sorted_terms()[::-1]:
        mate = by_coefficient.get(coefficient)
        if mate is None:
            # One side may see two loops as one: split the coarse loop of either side.
            for ax, cx in fx.terms:
                inner = quotient(coefficient, cx)
                if inner is not None and quotient(ax.extent, inner) not in (None, 1) and inner != 1:
                    raise NeedSplit(ax, inner)
            raise Mismatch("the two walk the tensor with different strides")
        _bind(axis, mate, bound, coefficient)
        matched += 1
    if matched != len(fx.terms):
        for ay, cy in fy.terms:
            for _, cx in fx.terms:
                inner = quotient(cx, cy)
                if inner is not None and quotient(ay.extent, inner) not in (None, 1) and inner != 1:
                    raise NeedSplit(ay, inner)
        raise Mismatch("one walks along a dimension that the other holds fixed")


def _bind(y: Axis, x: Axis, bound: dict[Axis, Axis], coefficient: object) -> None:
    if as_dim(x.extent - y.extent) != 0:
        if quotient(x.extent, y.extent) is not None:
            raise NeedSplit(x, y.extent)
        if quotient(y.extent, x.extent) is not None:
            raise NeedSplit(y, x.extent)
        raise Mismatch(f"rows of {y.extent} and of {x.extent} elements do not correspond")
    if bound.get(y, x) is not x or any(v is x and k is not y for k, v in bound.items()):
        raise Mismatch("one reads a row of the other that is not its own")
    bound[y] = x


def renaming(bound: dict[Axis, Axis]) -> dict[Axis, Affine]:
    return {y: of(x) for y, x in bound.items()}
