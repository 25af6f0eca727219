"""What a group region keeps in shared memory from one stage to the next.

A group's slice of a tensor, the T rows of one sample say, is brought in (or made) along its rows by
one stage and read again by later ones, often across its rows, 40 bytes here and 40 there. Out of
the second-level cache such pieces cost two or three times their bytes, and that cache's bandwidth
is what then bounds the kernel; on the shelf they cost nothing beyond the multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megafuse.fusion.plan import Root, RowRegion, Stage
from megafuse.index import Affine, offset
from megafuse.ir import Dim, Node, product

PAD = 32
"""Bytes between rows: pieces of neighbouring rows then fall into other banks."""
NARROWEST = 8
"""Bytes of a thread's share of a row below which copies to shared memory do not pay."""


@dataclass(frozen=True)
class Shelved:
    """A group's slice of `node`: `rows` of `columns` elements each. stage: the one that brings it
    in along its rows, or stores it (`made`). `alone`: nobody outside the region reads what is made,
    so it need not go to memory. uses: how often later stages read it."""

    node: Node
    rows: int
    columns: int
    stage: int
    made: bool
    alone: bool
    uses: int

    @property
    def pitch(self) -> int:
        """Elements from one row to the next."""
        return self.columns + PAD // self.node.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch * self.node.dtype.itemsize

    def place(self, at: Affine, region: RowRegion) -> Affine:
        """Where on the shelf the element at offset `at` of the tensor lies, in elements."""
        found = _inside(at, region)
        assert found is not None
        terms, const = found

        def moved(c: int) -> int:
            return c // self.columns * self.pitch + c % self.columns

        return Affine.make([(a, moved(c)) for a, c in terms], moved(const))

    def serves(self, k: int, at: Affine, region: RowRegion) -> bool:
        """Whether stage `k` finds what it reads at `at` here: later stages all they read, the one
        that brings it in its own row."""
        if k != self.stage:
            return k > self.stage
        return not self.made and _walks(at, region.stages[k], region) == self.columns


def shelvable(region: RowRegion) -> list[Shelved]:
    """What could be kept, the most worthwhile first."""
    if region.kind != "group":
        return []
    nodes = dict.fromkeys(
        [r.target for r in region.roots if r.kind == "store"]
        + [read.node for r in region.roots for read in r.reads]
    )
    found = [s for n in nodes if (s := _shelved(n, region)) is not None]
    return sorted(found, key=lambda s: -(s.uses + s.alone))


def _shelved(node: Node, region: RowRegion) -> Shelved | None:
    stores = [(k, r) for k, r in _roots(region) if r.kind == "store" and r.target is node]
    reads = [
        (k, offset(read.coords, node.room))
        for k, r in _roots(region) for read in r.reads if read.node is node
    ]  # fmt: skip
    reads = list(dict.fromkeys(reads))
    if len(stores) > 1 or node.dtype.itemsize not in (2, 4):
        return None
    if stores:
        first, at = stores[0][0], offset(stores[0][1].where, node.room)
    else:
        own = ((k, at) for k, at in reads if _walks(at, region.stages[k], region))
        first, at = next(own, (-1, None))  # type: ignore[assignment]
        if at is None or any(k < first for k, _ in reads):
            return None
    columns = _walks(at, region.stages[first], region)
    if columns is None or columns * node.dtype.itemsize % 16:
        return None
    later = [(k, a) for k, a in reads if k > first]
    if stores and len(later) < len(reads):
        return None
    total = _slice(at, region)
    wide = all(a.axes & set(region.stages[k].settled_cols()) for k, a in later)
    if not later or total is None or not wide:
        return None
    group = set(region.group)
    same = {t for t in at.terms if t[0] in group}
    for _, a in later:
        if {t for t in a.terms if t[0] in group} != same or not _fits(a, region, columns, total):
            return None
    alone = bool(stores) and node in region.alone
    return Shelved(node, total // columns, columns, first, bool(stores), alone, len(later))


def _roots(region: RowRegion) -> Iterator[tuple[int, Root]]:
    for k, stage in enumerate(region.stages):
        for root in stage.roots:
            yield k, root


def _inside(at: Affine, region: RowRegion) -> tuple[list, int] | None:  # type: ignore[type-arg]
    """The part of an offset inside a group: (terms, constant), all of them integers."""
    terms = [(a, c) for a, c in at.terms if a not in region.group]
    if not all(isinstance(c, int) and isinstance(a.extent, int) for a, c in terms):
        return None
    return (terms, at.const) if isinstance(at.const, int) else None


def _walks(at: Affine, stage: Stage, region: RowRegion) -> int | None:
    """Elements of a row, where `at` walks a group's slice row by row from its first element to its
    last, one after the other; else None."""
    found = _inside(at, region)
    if found is None or found[1] != 0:
        return None
    strides = {a: c for a, c in found[0]}
    step = 1
    for axis in reversed(stage.settled_cols()):
        if axis.extent != 1 and strides.pop(axis, None) != step:
            return None
        assert isinstance(axis.extent, int)
        step *= axis.extent
    columns = step
    for axis, stride in sorted(strides.items(), key=lambda t: t[1]):
        if stride != step:
            return None
        step *= axis.extent
    walked = product(a.extent for a in stage.axes if a not in region.group)
    return columns if step == walked and _apart(at, region, step) else None


def _apart(at: Affine, region: RowRegion, size: int) -> bool:
    """Whether different groups' slices of `size` elements do not overlap."""
    strides: list[Dim] = [c for a, c in at.terms if a in region.group]
    together = len(strides) == sum(a.extent != 1 for a in region.group)
    return together and all(isinstance(c, int) and c % size == 0 for c in strides)


def _slice(at: Affine, region: RowRegion) -> int | None:
    found = _inside(at, region)
    return None if found is None else 1 + sum(c * (a.extent - 1) for a, c in found[0])


def _fits(at: Affine, region: RowRegion, columns: int, total: int) -> bool:
    """Whether `at` stays inside the slice, and its rows and columns move apart."""
    found = _inside(at, region)
    if found is None or any(c < 0 for _, c in found[0]) or found[1] < 0:
        return False
    terms, const = found
    low = const % columns + sum(c % columns * (a.extent - 1) for a, c in terms)
    return low < columns and const + sum(c * (a.extent - 1) for a, c in terms) < total


def pinnable(region: RowRegion, most: int) -> list[tuple[Node, bool]]:
    """Tensors of `most` elements or fewer that a group could keep in shared memory throughout, as
    float32: (node, whether rows read it at different places)."""
    if region.kind != "group":
        return []
    written = {r.target for r in region.roots}
    found: dict[Node, bool] = {}
    for k, root in _roots(region):
        cols = region.stages[k].settled_cols()
        for read in root.reads:
            at, size = offset(read.coords, read.node.room), product(read.node.room)
            small = isinstance(size, int) and size <= most and read.node.dtype.is_floating_point
            if small and read.node not in written and cols and at.coefficient(cols[-1]) == 1:
                moves = bool(at.axes - set(cols))
                found[read.node] = found.get(read.node, False) or moves
    return list(found.items())


def pinned_bytes(nodes: Iterable[Node]) -> int:
    total = 0
    for node in nodes:
        size = product(node.shape)
        assert isinstance(size, int)
        total += -(-size // 4) * 16
    return total


def shelf_bytes(shelf: Iterable[Shelved]) -> int:
    return sum(s.nbytes for s in shelf)
