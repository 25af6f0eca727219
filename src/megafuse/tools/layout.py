"""Layered drawing of a directed acyclic graph: places for boxes, routes for edges.

The usual three steps (Sugiyama): a layer for each box by its longest path, an order within each
layer that crosses few edges, and x coordinates as near to the neighbours as the order allows. An
edge over several layers is routed through a dummy box in each layer between. Deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 12
_LANE = 10.0  # width that an edge passing a layer takes
_PULL = 0.85  # below 1, so that a drawing stays near its middle rather than drift sideways


@dataclass
class Box:
    """Something to draw: its size is given, its centre (x, y) is found."""

    name: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    layer: int = 0
    dummy: bool = False


@dataclass
class Drawing:
    """boxes by name; routes: for each edge the boxes it passes, ends included; size in pixels."""

    boxes: dict[str, Box]
    routes: dict[tuple[str, str], list[Box]]
    width: float = 0.0
    height: float = 0.0
    layers: list[list[Box]] = field(default_factory=list)


def lay_out(
    sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]],
    gap: tuple[float, float] = (18.0, 34.0), margin: float = 8.0,
) -> Drawing:  # fmt: skip
    """sizes: (width, height) of each box, in topological order; edges: pairs of their names; gap:
    least distance between boxes beside and below each other."""
    boxes = {name: Box(name, *size) for name, size in sizes.items()}
    edges = list(dict.fromkeys(edges))
    _assign_layers(boxes, edges)
    drawing = Drawing(boxes, {})
    depth = max((b.layer for b in boxes.values()), default=-1) + 1
    layers: list[list[Box]] = [[] for _ in range(depth)]
    drawing.layers = layers
    for box in boxes.values():
        layers[box.layer].append(box)
    below: dict[str, list[Box]] = {}
    above: dict[str, list[Box]] = {}
    for a, b in edges:
        route = [boxes[a]]
        for layer in range(boxes[a].layer + 1, boxes[b].layer):
            dummy = Box(f"{a}>{b}@{layer}", _LANE, 0.0, layer=layer, dummy=True)
            layers[layer].append(dummy)
            route.append(dummy)
        route.append(boxes[b])
        drawing.routes[a, b] = route
        for x, y in pairwise(route):
            below.setdefault(x.name, []).append(y)
            above.setdefault(y.name, []).append(x)
    _order(layers, above, below)
    _place(layers, above, below, gap[0])
    top = margin
    for layer_boxes in layers:
        tallest = max((b.height for b in layer_boxes), default=0.0)
        for box in layer_boxes:
            box.y = top + tallest / 2
            if box.dummy:
                box.height = tallest
        top += tallest + gap[1]
    everything = [b for layer_boxes in layers for b in layer_boxes]
    left = min((b.x - b.width / 2 for b in everything), default=0.0)
    for box in everything:
        box.x += margin - left
    drawing.width = max((b.x + b.width / 2 for b in everything), default=0.0) + margin
    drawing.height = max(top - gap[1] + margin, 2 * margin)
    return drawing


def _assign_layers(boxes: Mapping[str, Box], edges: Sequence[tuple[str, str]]) -> None:
    """Longest path from the top; a box nothing leads to sits right above its first reader."""
    into: dict[str, list[str]] = {name: [] for name in boxes}
    out: dict[str, list[str]] = {name: [] for name in boxes}
    for a, b in edges:
        into[b].append(a)
        out[a].append(b)
    for name, box in boxes.items():
        box.layer = max((boxes[a].layer + 1 for a in into[name]), default=0)
    for name, box in reversed(list(boxes.items())):
        if not into[name] and out[name]:
            box.layer = min(boxes[b].layer for b in out[name]) - 1


Neighbours = Mapping[str, Sequence[Box]]


def _order(layers: list[list[Box]], above: Neighbours, below: Neighbours) -> None:
    """Barycentre sweeps down and up; the order with the fewest crossings wins."""
    best = _crossings(layers, below), [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        rank = {b.name: float(i) for layer in layers for i, b in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            near = above if down else below

            def centre(
                box: Box, near: Neighbours = near, rank: Mapping[str, float] = rank
            ) -> float:
                places = [rank[n.name] for n in near.get(box.name, ())]
                return sum(places) / len(places) if places else rank[box.name]

            layer.sort(key=centre)
            rank.update({b.name: float(i) for i, b in enumerate(layer)})
        count = _crossings(layers, below)
        if count < best[0]:
            best = count, [list(layer) for layer in layers]
    for layer, chosen in zip(layers, best[1], strict=True):
        layer[:] = chosen


def _crossings(layers: Sequence[Sequence[Box]], below: Neighbours) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        rank = {b.name: i for i, b in enumerate(lower)}
        ends = [rank[n.name] for b in upper for n in
                sorted(below.get(b.name, ()), key=lambda n: rank[n.name])]  # fmt: skip
        count += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return count


def _place(
    layers: Sequence[Sequence[Box]], above: Neighbours, below: Neighbours, gap: float
) -> None:
    """Sweeps that move each layer as near to its neighbours as order and distances allow."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer), gap)
    for sweep in range(2 * _SWEEPS):
        near = (above, below)[sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for box in layer:
                others = near.get(box.name, ())
                mean = sum(o.x for o in others) / len(others) if others else box.x
                wanted.append(_PULL * mean)
            _spread(layer, wanted, gap)


def _spread(layer: Sequence[Box], wanted: Sequence[float], gap: float) -> None:
    """The places nearest to `wanted` (least squares) that keep order and distances: isotonic
    regression by pooling neighbours, once the distances are taken off. Dummies weigh more, so that
    long edges run straight."""
    offsets = [0.0]
    for a, b in pairwise(layer):
        offsets.append(offsets[-1] + (a.width + b.width) / 2 + gap)
    pools: list[tuple[float, float, int]] = []  # sum of weights, weighted mean, members
    for box, want, offset in zip(layer, wanted, offsets, strict=False):
        weight, mean, members = (4.0 if box.dummy else 1.0), want - offset, 1
        while pools and pools[-1][1] > mean:
            w, m, n = pools.pop()
            mean = (w * m + weight * mean) / (w + weight)
            weight, members = weight + w, members + n
        pools.append((weight, mean, members))
    places = [mean for _, mean, members in pools for _ in range(members)]
    for box, place, offset in zip(layer, places, offsets, strict=False):
        box.x = place + offset
