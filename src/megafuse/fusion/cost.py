"""Preference, and nothing but: legality is in rules/.

time = max(bytes / bandwidth, operations / rate) + launches. Bytes count each tensor of a region
once; rates are those of `megafuse.device`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megafuse.device import DeviceSpec
from megafuse.fusion.align import Mismatch
from megafuse.fusion.plan import Region, Root, RowRegion, Stage
from megafuse.fusion.rules.turn import Turn, strided, turns
from megafuse.fusion.walks import is_small, operands
from megafuse.index import Coords, operand_coords
from megafuse.ir import Node, evaluate, product
from megafuse.ops import is_pointwise, is_reduction, is_view

MOST_STREAMS = 14
MOST_COLUMN_SUMS = 8

SECTOR = 32
"""Bytes that a cache moves at least."""


def sectors(run: int, aligned: int) -> float:
    """Sectors that `run` bytes touch on average, if they begin anywhere at a multiple of `aligned`
    (0: of everything)."""
    step = math.gcd(aligned, SECTOR)
    return -(-run // SECTOR) if step == SECTOR else (run - step) / SECTOR + 1


HITS = 1.2
"""How much faster than memory the second-level cache of a GPU hands out sectors."""
WALKED = 24
"""Elements of a row that one thread works on, roughly: as many threads of a warp as a row leaves
over work on the next rows, and find their elements in the same sectors."""
FEWEST = 32
"""Bytes of a row from which on turning pays: a warp has many of shorter ones, side by side."""


def seconds(
    nbytes: int, flops: int, launches: int, spec: DeviceSpec, matmul: torch.dtype | None = None,
    again: float = 0.0,
) -> float:  # fmt: skip
    """Predicted time of one region on `spec`; `matmul` names the dtype of a product; again: bytes
    of sectors that a GPU fetches more than once."""
    rate = spec.vector_rate if matmul is None else spec.matmul_rate.get(matmul, spec.vector_rate)
    if spec.sm_count > 1:
        nbytes += int(again / HITS)
    return max(spec.move_seconds(nbytes), flops / rate) + launches * spec.launch_seconds


def turned(region: RowRegion) -> Turn | None:
    """The axis over which turning tensors saves most, and what is worth it there: small tensors
    come out of the nearest cache however they are walked. None where nothing is."""
    best: tuple[int, Turn] | None = None
    for turn in turns(region):
        uses = tuple(u for u in turn.uses if u.made or not is_small(u.node))
        gain = sum(u.node.dtype.itemsize for u in uses)
        short = any(_row_bytes(region.stages[0], u.node) < FEWEST for u in uses)
        if uses and not short and (best is None or gain > best[0]):
            best = gain, replace(turn, uses=uses)
    return None if best is None else best[1]


def sectors_again(region: RowRegion, sizes: Mapping[str, int]) -> float:
    """Bytes of the sectors that are fetched or written once more for each of a few elements, by
    whatever is used across the rows and not turned."""
    turn = turned(region)
    done = {(u.node, u.at) for u in turn.uses} if turn is not None else set()
    total = 0.0
    for stage in region.stages:
        for node, at, made in dict.fromkeys(operands(stage)):
            if (node, at) in done or not strided(at, stage) or (is_small(node) and not made):
                continue
            size = node.dtype.itemsize
            rows = [a for a in stage.rows() if a.extent != 1]
            follow = rows and at.coefficient(rows[-1]) == 1
            columns = stage.columns()
            assert isinstance(columns, int)
            shared = max(1, 32 // max(1, columns // WALKED)) if follow else 1
            count = evaluate(product(a.extent for a in at.axes), sizes)
            total += count * max(0.0, SECTOR / shared - size)
    return total


def _row_bytes(stage: Stage, node: Node) -> int:
    columns = stage.columns()
    assert isinstance(columns, int)
    return columns * node.dtype.itemsize


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
