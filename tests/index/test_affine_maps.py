"""Affine maps against torch's own indexing: every element, through random chains of views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import GraphBuilder

from megafuse.fusion.roots import Materialise, resolve
from megafuse.index import (
    Affine,
    Axis,
    NeedSplit,
    NotAffine,
    at_least_zero,
    divide,
    fresh_coords,
    of,
    offset,
    quotient,
    split_axis,
    strides,
    substitute,
)
from megafuse.ir import Node, evaluate, symbol

Step = tuple[str, Any]


def apply(g: GraphBuilder, x: Node, steps: Sequence[Step]) -> Node:
    for word, value in steps:
        match word:
            case "reshape":
                x = g.reshape(x, *value)
            case "permute":
                x = g.permute(x, *value)
            case "slice":
                x = g.slice(x, *value)
            case "expand":
                x = g.op("expand", x, shape=value)
    return x


def apply_torch(x: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    for word, value in steps:
        match word:
            case "reshape":
                x = x.reshape(value)
            case "permute":
                x = x.permute(value)
            case "slice":
                dim, start, stop, step = value
                x = torch.ops.aten.slice(x, dim, start, stop, step)
            case "expand":
                x = x.expand(value)
    return x


def refined(node: Node) -> tuple[list[Axis], tuple[Affine, ...], tuple[Affine, ...]]:
    """Axes of a walk over `node`, where it writes, and where it reads the input."""
    axes, there = fresh_coords(node)
    while True:
        try:
            base, coords = resolve(node, there, set())
            assert base.op == "input"
            return axes, there, coords
        except NeedSplit as need:
            outer, inner, replacement = split_axis(need.axis, need.inner)
            assert need.axis in axes
            at = axes.index(need.axis)
            axes[at : at + 1] = [a for a in (outer, inner) if a.extent != 1]
            there = substitute(there, {need.axis: replacement})


def value_of(form: Affine, at: dict[Axis, int], sizes: dict[str, int]) -> int:
    total = evaluate(form.const, sizes)
    return total + sum(evaluate(c, sizes) * at[a] for a, c in form.terms)


def check_map(node: Node, x: torch.Tensor, expected: torch.Tensor, sizes: dict[str, int]) -> None:
    axes, there, here = refined(node)
    source = node
    while source.inputs:
        source = source.inputs[0]
    write, read = offset(there, node.shape), offset(here, source.shape)
    extents = [evaluate(a.extent, sizes) for a in axes]
    flat, wanted = x.reshape(-1).tolist(), expected.reshape(-1).tolist()
    seen = set()
    for values in itertools.product(*map(range, extents)):
        at = dict(zip(axes, values, strict=True))
        to = value_of(write, at, sizes)
        assert flat[value_of(read, at, sizes)] == wanted[to]
        seen.add(to)
    assert seen == set(range(expected.numel()))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    assume(math.prod(shape) <= 288)
    first, steps = shape, []
    for _ in range(draw(st.integers(1, 4))):
        word = draw(st.sampled_from(["reshape", "permute", "slice", "expand"]))
        if word == "permute":
            order = tuple(draw(st.permutations(range(len(shape)))))
            steps.append((word, order))
            shape = tuple(shape[i] for i in order)
        elif word == "slice":
            dim = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, shape[dim] - 1))
            stop = draw(st.integers(start + 1, shape[dim]))
            step = draw(st.integers(1, 3))
            steps.append((word, (dim, start, stop, step)))
            shape = (*shape[:dim], len(range(start, stop, step)), *shape[dim + 1 :])
        elif word == "expand":
            shape = tuple(draw(st.sampled_from([1, 2, 3])) if s == 1 else s for s in shape)
            assume(math.prod(shape) <= 288)
            steps.append((word, shape))
        else:
            left, new = math.prod(shape), []
            while left > 1 and len(new) < 3:
                new.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
                left //= new[-1]
            shape = (*new, left)
            steps.append((word, shape))
    return first, steps


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains())
def test_random_view_chains(chain: tuple[tuple[int, ...], list[Step]]) -> None:
    shape, steps = chain
    g = GraphBuilder()
    node = apply(g, g.input(*shape), steps)
    x = torch.arange(math.prod(shape)).reshape(shape)
    expected = apply_torch(x, steps)
    assert node.shape == tuple(expected.shape)
    try:
        check_map(node, x, expected, {})
    except Materialise:
        assume(False)  # refused, never wrong; what must not be refused is listed below


B = symbol("s0")
T, D = 4, 12
MIXING = [("reshape", (B, T, T, D // T)), ("permute", (0, 2, 1, 3)), ("reshape", (B, T, D))]


@pytest.mark.parametrize(
    "steps",
    [
        MIXING,
        MIXING + MIXING,
        [("permute", (1, 0, 2))],
        [("reshape", (B * T, D))],
        [("reshape", (B, T * D)), ("reshape", (B * T, D)), ("reshape", (B, T, D))],
        [("permute", (1, 0, 2)), ("reshape", (T * B, D)), ("reshape", (T, B, D))],
        [("slice", (2, 5, 11, 2)), ("permute", (2, 0, 1))],
        [("slice", (2, 6, 12, 1)), ("reshape", (B, T * 6))],
        [("reshape", (B, 1, T, D)), ("expand", (B, 3, T, D)), ("reshape", (B, 3 * T, D))],
        [("reshape", (B, T, D // 2, 2)), ("permute", (0, 3, 1, 2)), ("reshape", (B, 2, T * 6))],
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_symbolic_batch(steps: list[Step], batch: int) -> None:
    g = GraphBuilder()
    node = apply(g, g.input(B, T, D), steps)
    x = torch.arange(batch * T * D).reshape(batch, T, D)

    def fixed(word: str, value: Any) -> Step:
        if word in ("reshape", "expand"):
            value = tuple(evaluate(d, {"s0": batch}) for d in value)
        return word, value

    check_map(node, x, apply_torch(x, [fixed(*s) for s in steps]), {"s0": batch})


def test_token_mixing_splits_the_column_axis_once() -> None:
    g = GraphBuilder()
    axes, _, _ = refined(apply(g, g.input(B, T, D), MIXING))
    assert [a.extent for a in axes] == [B, T, T, D // T]


def test_a_map_that_no_split_makes_affine_is_refused() -> None:
    g = GraphBuilder()
    node = apply(g, g.input(2, 3), [("permute", (1, 0)), ("reshape", (2, 3))])
    with pytest.raises(Materialise) as refused:
        refined(node)
    assert refused.value.node is node


def test_divide() -> None:
    i, j = Axis("i", 6), Axis("j", 4)
    form = of(i) * 8 + of(j) + 17
    high, low = divide(form, 8)
    assert str(high) == "i + 2" and str(low) == "j + 1"
    with pytest.raises(NeedSplit) as need:
        divide(of(Axis("k", 12)), 4)
    assert need.value.inner == 4 and need.value.axis.name == "k"
    with pytest.raises(NotAffine):
        divide(of(i) + of(j), 5)
    assert divide(form, 1) == (form, Affine.make((), 0))
    high, low = divide(of(i) * B + of(Axis("b", B)), B)
    assert str(high) == "i" and str(low) == "b"


def test_symbolic_bounds_and_quotients() -> None:
    assert quotient(12, 4) == 3 and quotient(12, 5) is None
    assert quotient(B * 12, B) == 12 and quotient(B * 12, 4) == 3 * B and quotient(12, B) is None
    assert at_least_zero(B - 1) and not at_least_zero(B - 2) and not at_least_zero(1 - B)
    assert strides((B, 3, 4)) == [12, 4, 1]
    assert strides((3, B, 4)) == [4 * B, 4, 1]


def test_axes_of_extent_one_and_zero_coefficients_vanish() -> None:
    one, i = Axis("one", 1), Axis("i", 5)
    assert of(one) == Affine.make((), 0)
    assert Affine.make([(one, 3), (i, 2), (i, -2)], 7) == Affine.make((), 7)
    assert (of(i) * 3 + 1).substitute({i: of(Axis("a", 5)) * 2 + 4}).const == 13
