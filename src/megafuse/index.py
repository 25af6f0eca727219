"""Affine index maps: which element of a tensor an iteration reads or writes.

An iteration space is a list of `Axis`; a coordinate is `sum(coefficient * axis) + constant`. Views
only rename elements, so reading through a view is a map of coordinates. Where a reshape cuts an
axis in two (20 of 1280 columns, say) the map is affine only over the finer axes: `NeedSplit` asks
the owner of the space to split that axis and start over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy

from megafuse.ir import Dim, Node, as_dim


@dataclass(eq=False)
class Axis:
    """One loop: a name for printing and an extent. Axes split from one dimension share a family."""

    name: str
    extent: Dim
    family: object = None

    def __post_init__(self) -> None:
        if self.family is None:
            self.family = self

    def __repr__(self) -> str:
        return self.name


class NeedSplit(Exception):
    """`axis` must become (outer, inner) with `inner` of the given extent."""

    def __init__(self, axis: Axis, inner: Dim) -> None:
        super().__init__(f"split {axis} by {inner}")
        self.axis, self.inner = axis, inner


class NotAffine(Exception):
    """No refinement of the axes makes this map affine; the tensor has to be copied."""


def quotient(a: Dim, n: Dim) -> Dim | None:
    """a / n when that is exact for all sizes, else None."""
    if isinstance(a, int) and isinstance(n, int):
        return a // n if a % n == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / n)
    _, denominator = sympy.fraction(ratio)
    return as_dim(ratio) if denominator == 1 else None


def content(value: Dim) -> int:
    """The largest integer that divides `value` for all sizes."""
    if isinstance(value, int):
        return abs(value)
    poly = sympy.Poly(value, *value.free_symbols)
    return reduce(math.gcd, (int(abs(c)) for c in poly.coeffs()), 0)


def at_least_zero(value: Dim) -> bool:
    """Whether `value` >= 0 for all positive sizes (False when that cannot be shown)."""
    if isinstance(value, int):
        return value >= 0
    # Sizes are positive integers: with s = t + 1, t >= 0, non-negative coefficients suffice.
    shifted = sympy.expand(value.subs({s: s + 1 for s in value.free_symbols}))
    return all(c >= 0 for c in sympy.Poly(shifted, *shifted.free_symbols).coeffs()) \
        if shifted.free_symbols else shifted >= 0  # fmt: skip


@dataclass(frozen=True)
class Affine:
    """sum(coefficient * axis) + const; axes of extent 1 and zero coefficients never appear."""

    terms: frozenset[tuple[Axis, Dim]]
    const: Dim = 0

    @staticmethod
    def make(terms: Iterable[tuple[Axis, Dim]], const: Dim = 0) -> Affine:
        sums: dict[Axis, Dim] = {}
        for axis, coefficient in terms:
            if axis.extent != 1:
                sums[axis] = as_dim(sums.get(axis, 0) + coefficient)
        return Affine(frozenset((a, c) for a, c in sums.items() if c != 0), as_dim(const))

    @property
    def axes(self) -> set[Axis]:
        return {axis for axis, _ in self.terms}

    def coefficient(self, axis: Axis) -> Dim:
        return next((c for a, c in self.terms if a is axis), 0)

    def __add__(self, other: Affine | Dim) -> Affine:
        if isinstance(other, Affine):
            return Affine.make([*self.terms, *other.terms], self.const + other.const)
        return Affine(self.terms, as_dim(self.const + other))

    def __mul__(self, factor: Dim) -> Affine:
        return Affine.make([(a, as_dim(c * factor)) for a, c in self.terms], self.const * factor)

    def substitute(self, replacement: Mapping[Axis, Affine]) -> Affine:
        if not any(a in replacement for a, _ in self.terms):
            return self
        result = Affine.make((), self.const)
        for axis, coefficient in self.terms:
            result = result + replacement.get(axis, of(axis)) * coefficient
        return result

    def sorted_terms(self) -> list[tuple[Axis, Dim]]:
        """Largest stride first (symbolic ones count as large)."""
        return sorted(self.terms, key=lambda t: (-magnitude(t[1]), t[0].name))

    def __str__(self) -> str:
        parts = [f"{c}*{a}" if c != 1 else str(a) for a, c in self.sorted_terms()]
        if self.const != 0 or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)


def magnitude(value: Dim) -> float:
    """A number that orders extents and strides; run-time sizes count as large."""
    if isinstance(value, int):
        return float(value)
    return float(value.subs({s: 1_000_003 for s in value.free_symbols}))


ZERO = Affine(frozenset(), 0)
Coords = tuple[Affine, ...]


def of(axis: Axis) -> Affine:
    return ZERO if axis.extent == 1 else Affine(frozenset({(axis, 1)}), 0)


def divide(value: Affine, n: Dim) -> tuple[Affine, Affine]:
    """(value // n, value % n). Raises NeedSplit or NotAffine."""
    if n == 1:
        return value, ZERO
    high: list[tuple[Axis, Dim]] = []
    low: list[tuple[Axis, Dim]] = []
    for axis, coefficient in value.terms:
        q = quotient(coefficient, n)
        if q is None:
            low.append((axis, coefficient))
        else:
            high.append((axis, q))
    if isinstance(value.const, int) and isinstance(n, int):
        high_const, low_const = divmod(value.const, n)
    else:
        q = quotient(value.const, n)
        high_const, low_const = (q, 0) if q is not None else (0, value.const)
    largest: Dim = low_const
    for axis, coefficient in low:
        largest = as_dim(largest + coefficient * (axis.extent - 1))
    if not at_least_zero(as_dim(n - 1 - largest)):
        for axis, coefficient in sorted(low, key=lambda t: -magnitude(t[1])):
            inner = quotient(n, coefficient)
            if inner is not None and inner != 1 and quotient(axis.extent, inner) not in (None, 1):
                raise NeedSplit(axis, inner)
        raise NotAffine(f"{value} mod {n}")
    return Affine.make(high, high_const), Affine.make(low, low_const)


def strides(shape: Sequence[Dim]) -> list[Dim]:
    """Row-major element strides of a contiguous tensor."""
    result: list[Dim] = []
    step: Dim = 1
    for extent in reversed(shape):
        result.insert(0, step)
        step = as_dim(step * extent)
    return result


def offset(coords: Coords, shape: Sequence[Dim]) -> Affine:
    """The element offset of `coords` in a contiguous tensor."""
    total = ZERO
    for coordinate, stride in zip(coords, strides(shape), strict=True):
        total = total + coordinate * stride
    return total


def operand_coords(node: Node, operand: Node, coords: Coords) -> Coords:
    """Where `operand` is read to compute `node` at `coords`.

    For views the view's map; for pointwise operators broadcasting. Raises NeedSplit, NotAffine.
    """
    match node.op:
        case "permute":
            order = node.attrs["order"]
            return tuple(coords[order.index(i)] for i in range(len(order)))
        case "slice":
            a = node.attrs
            return tuple(
                c * a["step"] + a["start"] if i == a["dim"] else c for i, c in enumerate(coords)
            )
        case "reshape":
            rest = offset(coords, node.shape)
            result: list[Affine] = []
            for extent in reversed(operand.shape[1:]):
                rest, inside = divide(rest, extent)
                result.insert(0, inside)
            return (rest, *result) if operand.shape else ()
    missing = len(coords) - len(operand.shape)
    pairs = zip(operand.shape, coords[missing:], strict=True)
    return tuple(ZERO if extent == 1 else c for extent, c in pairs)


def fresh_coords(node: Node, stem: str = "i") -> tuple[list[Axis], Coords]:
    """One new axis for each extent of `node` other than 1, and the coordinates over them."""
    axes, coords = [], []
    for dim, extent in enumerate(node.shape):
        axis = Axis(f"{stem}{dim}", extent)
        coords.append(of(axis))
        if extent != 1:
            axes.append(axis)
    return axes, tuple(coords)


def split_axis(axis: Axis, inner: Dim) -> tuple[Axis, Axis, Affine]:
    """(outer, inner, what replaces `axis`)."""
    outer_extent = quotient(axis.extent, inner)
    assert outer_extent is not None
    a = Axis(f"{axis.name}o", outer_extent, axis.family)
    b = Axis(f"{axis.name}i", inner, axis.family)
    return a, b, of(a) * inner + of(b)


def substitute(coords: Coords, replacement: Mapping[Axis, Affine]) -> Coords:
    return tuple(c.substitute(replacement) for c in coords)


def show(coords: Any) -> str:
    return "[" + ", ".join(map(str, coords)) + "]"
