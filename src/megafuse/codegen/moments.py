"""A row's mean and variance out of one reduction.

A variance is written as eager computes it: the sum of the row, and once that is known the sum of
the squared deviations from its mean, which is a second reduction that waits for the first. Where
all that is stored has 16 bits both come out of one instead: every thread sums deviations from its
own first element, and parts are put together by their means (`Moments` in tile/team.cuh). Where the
row's deviations are wanted afterwards, as by a norm that is applied at once, that would only add a
subtraction: there the second pass computes what is needed anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megafuse.fusion.plan import Root, Stage
from megafuse.index import Coords, operand_coords
from megafuse.ir import Node

Settle = Callable[[Node, Coords], tuple[Node, Coords, str]]


def moments(stage: Stage, settle: Settle) -> tuple[Root, Root] | None:
    """(sum, sum of squared deviations from the mean): the stage's two reductions, where it has no
    others and wants the deviations for nothing else. Several means at once are cheaper as they are:
    their reductions share shuffles."""
    sums = [r for r in stage.roots if r.kind == "row"]
    if len(sums) != 2 or any(r.node.op != "sum" for r in sums):
        return None
    for total, squares in (sums, sums[::-1]):
        difference = _deviation(squares, total, stage, settle)
        if difference is not None:
            others = (r for r in stage.roots if r is not squares)
            wanted = any(difference in _computed(r, settle) for r in others)
            return None if wanted else (total, squares)
    return None


def _computed(root: Root, settle: Settle) -> Iterator[tuple[Node, Coords]]:
    """Everything that is computed for a root, down to what is read or reduced."""
    if root.kind == "store":
        start = [(root.node, root.at)]
        if root.target is root.node:
            start = [(i, operand_coords(root.node, i, root.at)) for i in root.node.inputs]
    else:
        start = [(root.node.inputs[0], root.at)]
    seen = set()
    while start:
        node, coords, what = settle(*start.pop())
        if what != "compute" or (node, coords) in seen:
            continue
        seen.add((node, coords))
        yield node, coords
        start += [(i, operand_coords(node, i, coords)) for i in node.inputs]


def _deviation(
    squares: Root, total: Root, stage: Stage, settle: Settle
) -> tuple[Node, Coords] | None:
    """x - sum(x) / n, the sum being `total`, if it is that which `squares` sums the squares of."""

    def operands(op: str, found: tuple[Node, Coords, str]) -> list[tuple[Node, Coords, str]] | None:
        node, coords, what = found
        if what != "compute" or node.op != op or len(node.inputs) != len(node.args):
            return None
        return [settle(i, operand_coords(node, i, coords)) for i in node.inputs]

    factors = operands("mul", settle(squares.node.inputs[0], squares.at))
    if factors is None or factors[0] != factors[1]:
        return None
    sides = operands("sub", factors[0])
    if sides is None or sides[0] != settle(total.node.inputs[0], total.at):
        return None
    mean, coords, what = sides[1]
    if what != "compute" or mean.op != "div" or mean.args[1] != stage.columns():
        return None
    summed = settle(mean.inputs[0], operand_coords(mean, mean.inputs[0], coords))
    return factors[0][:2] if summed == (total.node, total.out(), "reduction") else None
