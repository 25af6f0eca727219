"""How norms take fewer instructions and reductions, where all that is stored has 16 bits.

A mean and its variance come out of one reduction. A variance is written as eager computes it: the
sum of the row, and once that is known the sum of the squared deviations from its mean, which is a
second reduction that waits for the first. Instead every thread sums deviations from its own first
element, and parts are put together by their means (`Moments` in tile/team.cuh). Where the row's
deviations are wanted afterwards, as by a norm that is applied at once, that would only add a
subtraction: there the second pass computes what is needed.

(x - mean) * scale is x * scale - mean * scale, one instruction an element. What mean * scale loses
when it rounds is what rounding the mean itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megafuse.fusion.plan import Root, Stage
from megafuse.index import Coords, operand_coords
from megafuse.ir import Node

Key = tuple[Node, Coords]
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
            wanted = any(difference == key for r in others for key, _ in _uses(r, settle))
            return None if wanted else (total, squares)
    return None


def scaled_once(roots: Iterable[Root], settle: Settle) -> set[Key]:
    """Differences that one product takes, and nothing else that these roots need."""
    users: dict[Key, set[Key | None]] = {}
    for root in roots:
        for key, user in _uses(root, settle):
            users.setdefault(key, set()).add(user)
    return {
        key for key, by in users.items()
        if key[0].op == "sub" and len(by) == 1
        and all(u is not None and u[0].op == "mul" for u in by)
    }  # fmt: skip


def _uses(root: Root, settle: Settle) -> Iterator[tuple[Key, Key | None]]:
    """(what is computed for a root, down to what is read or reduced; what uses it there, or None
    for the root itself)."""
    start: list[tuple[Node, Coords, Key | None]] = [(root.node, root.at, None)]
    if root.kind != "store" or root.target is root.node:
        start = [(i, operand_coords(root.node, i, root.at), None) for i in root.node.inputs]
    seen = set()
    while start:
        node, coords, user = start.pop()
        node, coords, what = settle(node, coords)
        if what != "compute":
            continue
        key = (node, coords)
        yield key, user
        if key not in seen:
            seen.add(key)
            start += [(i, operand_coords(node, i, coords), key) for i in node.inputs]


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
