"""Preference, and nothing but: legality is in rules/.

time = max(bytes / bandwidth, operations / rate) + launches. Bytes count each tensor of a region
once; rates are those of `megafuse.device`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megafuse.device import DeviceSpec
from megafuse.fusion.align import Mismatch
from megafuse.fusion.plan import Region, Root, RowRegion, Stage
from megafuse.index import Coords, operand_coords
from megafuse.ir import Node, evaluate
from megafuse.ops import is_pointwise, is_reduction, is_view

MOST_STREAMS = 14
MOST_COLUMN_SUMS = 8

SECTOR = 32
"""Bytes that a cache moves at least."""


def sectors(run: int, aligned: int) -> float:
    """Sectors that `run` bytes touch on average, if they begin anywhere at a multiple of `aligned`
    (0: of everything)."""
    step = math.gcd(aligned, SECTOR)
    return (run - step) // SECTOR + 1 if step == SECTOR else (run - step) / SECTOR + 1


def seconds(
    nbytes: int, flops: int, launches: int, spec: DeviceSpec, matmul: torch.dtype | None = None
) -> float:
    """Predicted time of one region on `spec`; `matmul` names the dtype of a product."""
    rate = spec.vector_rate if matmul is None else spec.matmul_rate.get(matmul, spec.vector_rate)
    return max(spec.move_seconds(nbytes), flops / rate) + launches * spec.launch_seconds


def check_size(stage: Stage) -> None:
    """Refuse a stage that would not fit a thread's registers. Raises Mismatch."""
    streams = {(r.node, r.coords) for root in stage.roots for r in root.reads
               if any(a in stage.settled_cols() for c in r.coords for a in c.axes)}  # fmt: skip
    if len(streams) > MOST_STREAMS:
        raise Mismatch(f"together they stream {len(streams)} tensors, more than registers hold")
    if sum(r.kind == "column" for r in stage.roots) > MOST_COLUMN_SUMS:
        raise Mismatch("together they keep more column sums than registers hold")


def worth_writing(
    regions: Sequence[Region], buffers: set[Node], sizes: Mapping[str, int]
) -> set[Node]:
    """The pointwise value whose recomputation in several places costs more loads than writing it
    once and reading it back: at most one, the most wasteful."""
    places: dict[Node, dict[tuple[int, Coords], int]] = {}
    for region in regions:
        for stage in region.stages if isinstance(region, RowRegion) else ():
            walker = _Leaves(buffers)
            for root in stage.roots:
                walker.visit_root(root)
            cols = set(stage.settled_cols())
            for (node, coords), leaves in walker.memo.items():
                if is_pointwise(node) and node not in buffers:
                    moved = sum(evaluate(leaf.type.nbytes, sizes) for leaf, at in leaves
                                if any(cols & c.axes for c in at))  # fmt: skip
                    places.setdefault(node, {})[id(stage), coords] = moved
    best: Node | None = None
    gain = 0
    for node, moved_at in places.items():
        size = evaluate(node.type.nbytes, sizes)
        saved = sum(moved_at.values()) - (2 + len(moved_at)) * size
        if len(moved_at) > 1 and saved >= max(gain, 1):  # of equals the latest, nearest its users
            best, gain = node, saved
    return {best} if best is not None else set()


Leaf = tuple[Node, Coords]


class _Leaves:
    """The buffers and reductions under every value a stage computes, memoised by place."""

    def __init__(self, buffers: set[Node]) -> None:
        self.buffers = buffers
        self.memo: dict[Leaf, frozenset[Leaf]] = {}

    def visit_root(self, root: Root) -> None:
        if root.kind == "store" and not is_reduction(root.node):
            self.under(root.node, root.at, expand=root.target is root.node)
        elif root.kind != "store":
            self.under(root.node.inputs[0], root.at)

    def under(self, node: Node, coords: Coords, expand: bool = False) -> frozenset[Leaf]:
        while is_view(node) and (expand or node not in self.buffers):
            node, coords = node.inputs[0], operand_coords(node, node.inputs[0], coords)
            expand = False
        if (node, coords) in self.memo:
            return self.memo[node, coords]
        if (node in self.buffers and not expand) or is_reduction(node):
            return frozenset({(node, coords)})
        leaves: frozenset[Leaf] = frozenset().union(
            *(self.under(i, operand_coords(node, i, coords)) for i in node.inputs)
        )
        self.memo[node, coords] = leaves
        return leaves
