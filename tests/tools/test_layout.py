"""Layered drawings: boxes keep apart, edges run downwards, long ones go around."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megafuse.tools.layout import Drawing, lay_out


def random_graph(seed: int) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]]]:
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    sizes = {f"n{i}": (rng.uniform(20, 200), rng.uniform(10, 90)) for i in range(count)}
    edges = [(f"n{a}", f"n{b}") for b in range(count) for a in range(b) if rng.random() < 2 / count]
    return sizes, edges


def assert_nothing_touches(drawing: Drawing) -> None:
    for layer in drawing.layers:
        for a, b in pairwise(layer):
            assert a.x + a.width / 2 < b.x - b.width / 2 + 1e-6
        for box in layer:
            assert box.x - box.width / 2 >= 0 and box.x + box.width / 2 <= drawing.width
            assert box.y - box.height / 2 >= 0 and box.y + box.height / 2 <= drawing.height


@pytest.mark.parametrize("seed", range(30))
def test_any_graph(seed: int) -> None:
    sizes, edges = random_graph(seed)
    drawing = lay_out(sizes, edges)
    assert_nothing_touches(drawing)
    for (a, b), route in drawing.routes.items():
        assert route[0].name == a and route[-1].name == b
        bottoms = [box.y + box.height / 2 for box in route[:-1]]
        assert all(y < box.y - box.height / 2 for y, box in zip(bottoms, route[1:], strict=True))
        assert all(box.dummy for box in route[1:-1])
    again = lay_out(sizes, edges)
    assert {n: (b.x, b.y) for n, b in drawing.boxes.items()} == {
        n: (b.x, b.y) for n, b in again.boxes.items()
    }


def test_crossings_are_undone() -> None:
    """a, b above; d, c below, wired straight: the order below turns around."""
    sizes = {n: (40.0, 20.0) for n in "abdc"}
    drawing = lay_out(sizes, [("a", "c"), ("b", "d")])
    boxes = drawing.boxes
    assert (boxes["a"].x < boxes["b"].x) == (boxes["c"].x < boxes["d"].x)


def test_a_late_source_sits_above_its_reader() -> None:
    drawing = lay_out({n: (40.0, 20.0) for n in "abcs"}, [("a", "b"), ("b", "c"), ("s", "c")])
    assert drawing.boxes["s"].layer == drawing.boxes["b"].layer == 1


def test_nothing() -> None:
    assert lay_out({}, []).height > 0
