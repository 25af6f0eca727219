"""Affine offsets as C++: the row's part once a row, the column's as a function of the column."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import sympy

from megafuse.index import Affine, Axis, content, quotient
from megafuse.ir import Dim, as_dim


def dim_cpp(value: Dim) -> str:
    """An extent or stride in terms of the kernel's size arguments."""
    if isinstance(value, int):
        return str(value)
    text = re.sub(r"(\w+)\*\*(\d+)", lambda m: "*".join([m[1]] * int(m[2])), str(sympy.sstr(value)))
    if "**" in text or "/" in text:
        raise ValueError(f"size {value} is no polynomial megafuse can print")
    for s in sorted(value.free_symbols, key=lambda s: -len(s.name)):
        text = text.replace(s.name, f"a.{s.name}")
    return text if value.is_Symbol else f"({text})"


def sum_cpp(terms: Sequence[tuple[str, Dim]], const: Dim = 0) -> str:
    """`name * coefficient + ... + const`, without the parts that vanish."""
    parts = [n if c == 1 else f"{n} * {dim_cpp(c)}" for n, c in terms if c != 0]
    if const != 0 or not parts:
        parts.append(dim_cpp(const))
    return " + ".join(parts)


def decompose(index: str, extents: Sequence[Dim], narrow: bool = False) -> list[str]:
    """C++ for each axis' value, given a linear index over their extents (the last one fastest).
    narrow: `index` is an int, and so are all extents: a 64-bit division costs a hundred
    instructions."""

    def spell(extent: Dim) -> str:
        text = dim_cpp(extent)
        return f"int({text})" if narrow and not isinstance(extent, int) else text

    values: list[str] = []
    inner: Dim = 1
    for position, extent in reversed(list(enumerate(extents))):
        text = index if inner == 1 else f"{index} / {spell(inner)}"
        if position > 0:
            text = f"({text})" if inner != 1 else text
            text = f"{text} % {spell(extent)}"
        values.insert(0, text)
        inner = as_dim(inner * extent)
    return values


@dataclass(frozen=True)
class Access:
    """How one tensor is addressed by a stage.

    row: C++ of the offset that is fixed for a row.
    column: C++ of the offset as a function of column `c`; None when the element does not depend on
        the column at all.
    run: how many consecutive columns, aligned at multiples of it, lie together (kind "run") or
        share one element (kind "splat").
    period: the offset is the same so many columns further on; 0 where it never repeats.
    """

    row: str
    column: str | None
    run: int
    kind: Literal["run", "splat"]
    symbolic_column: bool = False
    period: int = 0


def access(
    offset: Affine, cols: Sequence[Axis], lanes: int, row_name: Callable[[Axis], str]
) -> Access:
    """`offset` in elements over a stage's axes; `lanes`: columns a thread handles together."""
    row_terms = [(a, c) for a, c in offset.sorted_terms() if a not in cols]
    row = sum_cpp([(row_name(a), c) for a, c in row_terms], offset.const)
    strides = [(offset.coefficient(a), a.extent) for a in cols]
    if all(c == 0 for c, _ in strides):
        return Access(row, None, lanes, "splat")
    # Merge neighbouring column axes that the tensor walks as one.
    merged: list[tuple[Dim, int]] = []
    for stride, extent in strides:
        assert isinstance(extent, int)
        if merged and quotient(merged[-1][0], extent) == stride and merged[-1][0] != 0:
            merged[-1] = (stride, merged[-1][1] * extent)
        elif merged and merged[-1][0] == stride == 0:
            merged[-1] = (0, merged[-1][1] * extent)
        else:
            merged.append((stride, extent))
    inner_stride, inner_extent = merged[-1]
    others = [content(c) for _, c in row_terms] + [content(offset.const)]
    others += [content(s) for s, _ in merged[:-1]]
    if inner_stride == 1:
        run = reduce(math.gcd, [lanes, *others])
        if len(merged) > 1:
            run = math.gcd(run, inner_extent)
        kind: Literal["run", "splat"] = "run"
    elif inner_stride == 0:
        run, kind = math.gcd(lanes, inner_extent), "splat"
    else:
        run, kind = 1, "run"
    names: list[tuple[str, Dim]] = []
    inner = 1
    for position, (stride, extent) in reversed(list(enumerate(merged))):
        text = "c" if inner == 1 else f"c / {inner}"
        if position > 0:
            text = f"{text} % {extent}"
        names.insert(0, (text if len(merged) == 1 else f"({text})", stride))
        inner *= extent
    symbolic = any(not isinstance(s, int) for s, _ in merged)
    period = inner // merged[0][1] if merged[0][0] == 0 else 0
    return Access(row, sum_cpp(names), run, kind, symbolic, period)
