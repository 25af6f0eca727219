"""Values that are gathered from pieces of other rows, each with statistics of its own."""

from __future__ import annotations

from collections.abc import Collection

from megafuse.index import (
    Axis,
    Coords,
    NeedSplit,
    NotAffine,
    fresh_coords,
    operand_coords,
    split_axis,
    substitute,
)
from megafuse.ir import Node
from megafuse.ops import is_pointwise, is_reduction, is_view


def gathers(node: Node, held: Collection[Node]) -> bool:
    """Whether to compute `node` from the values in `held` means to gather each of its rows from
    pieces of others, and to scale every piece by what a reduction of its own row gave: rows that a
    norm has normalised, cut up and put together anew. Rows that come whole, in any order, are none;
    nor are columns, whose statistics lie side by side."""
    if node.op == "cast" or not is_pointwise(node) or not node.shape:
        return False
    if not any(_permuted(i) for i in node.inputs):
        return False
    axes, coords = fresh_coords(node)
    row = {a for a in axes if a in coords[-1].axes}
    while True:
        try:
            return _crosses(node, coords, row, held)
        except NeedSplit as need:
            outer, inner, both = split_axis(need.axis, need.inner)
            coords = substitute(coords, {need.axis: both})
            if need.axis in row:
                row = row - {need.axis} | {outer, inner}
        except NotAffine:
            return False


def _permuted(node: Node) -> bool:
    while is_view(node):
        if node.op == "permute":
            return True
        node = node.inputs[0]
    return False


def _crosses(node: Node, coords: Coords, row: set[Axis], held: Collection[Node]) -> bool:
    """Whether some statistic's place moves with the outer part of `node`'s row and not with the
    inner one. Raises NeedSplit, NotAffine."""
    stack = [(node, coords)]
    seen = set(stack)
    while stack:
        node, coords = stack.pop()
        for operand in node.inputs:
            at = operand_coords(node, operand, coords)
            key = operand, at
            if operand in held or key in seen:
                continue
            seen.add(key)
            if is_reduction(operand):
                moving = {a for a in row for c in at if a in c.axes}
                if moving and moving != row:
                    return True
            elif is_pointwise(operand) or is_view(operand):
                stack.append(key)
    return False
