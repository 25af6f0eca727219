"""The tail of a product as C++: what its row region computes, one element at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megafuse.codegen.emitter import Emitter
from megafuse.codegen.matmul import Tail
from megafuse.codegen.rows import is_fast
from megafuse.codegen.schedule import Schedule, StageSchedule
from megafuse.codegen.stage import StageEmitter
from megafuse.fusion import plan
from megafuse.fusion.plan import Root
from megafuse.index import Axis, Coords
from megafuse.ir import Node


def emit_tail(node: Node, tail: plan.Tail, buffers: set[Node], rounding: bool) -> Tail:
    """node: the product. rounding: as for `emit_rows`."""
    emitter = _Elements(node, tail, buffers, rounding)
    for i, root in enumerate(tail.sums):
        emitter.add(f"s[{i}]", root)
    for i, (out, _) in enumerate(tail.outs):
        if out is None:
            emitter.body.append(f"y[{i}] = x;  // {node.name}")
        else:
            emitter.add(f"y[{i}]", out)
    return Tail(tuple(emitter.lines()), len(tail.ins), len(tail.outs), len(tail.sums))


class _Elements(StageEmitter):
    """A stage whose every value is one element's: no rows, no streams."""

    def __init__(self, node: Node, tail: plan.Tail, buffers: set[Node], rounding: bool) -> None:
        region = tail.region
        (stage,) = region.stages
        emitter = Emitter(region, buffers, Schedule(1, 1, ()), rounding, is_fast(region))
        names = {(read.node, read.coords): f"t[{i}]" for i, (read, _) in enumerate(tail.ins)}
        streams: Any = _Names(node, names, set(stage.axes))
        super().__init__(emitter, 0, stage, StageSchedule(0, 1, 1, False), streams)
        self.scaled = set()
        self.before: list[str] = []
        self.body: list[str] = []
        self.memo: dict[tuple[Node, Coords], str] = {}

    def add(self, target: str, root: Root) -> None:
        if root.kind == "store":
            expand = root.target is root.node
            value = self.value(root.node, root.at, self.before, self.body, self.memo, expand)
        else:
            value = self.value(root.node.inputs[0], root.at, self.before, self.body, self.memo)
        self.body.append(f"{target} = {value};  // {root.node.origin}")

    def lines(self) -> Sequence[str]:
        return [*self.before, *self.body]


class _Names:
    """What stands for the streams of a row: the element at hand of every tensor."""

    def __init__(
        self, node: Node, names: dict[tuple[Node, Coords], str], axes: set[Axis]
    ) -> None:
        """axes: of the stage; along all of them values differ."""
        self.node, self.names, self.col_set = node, names, axes

    def leaf(self, node: Node, coords: Coords) -> tuple[str, bool]:
        """(name, whether it varies along a row: it is named, and that is all)."""
        return ("x" if node is self.node else self.names[node, coords]), False
