"""What the planner produces: regions over materialised buffers, and why each boundary is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megafuse.index import Affine, Axis, Coords, substitute
from megafuse.ir import Dim, Graph, Node, as_dim, evaluate, product


@dataclass(frozen=True)
class WhyNotFused:
    """Two neighbours that stay apart, and the reason in a sentence a user understands."""

    producer: str
    consumer: str
    reason: str


@dataclass
class Read:
    """A value fetched while computing a root: a buffer's element, or a reduction of this stage."""

    node: Node
    coords: Coords


@dataclass
class Root:
    """One result a row program computes.

    kind "row": a reduction over all columns of a row; its value stays in the program.
    kind "column": a sum over rows; leaves as fp32 partials and is finished by a second step.
    kind "store": a value written to a buffer, element by element or once per row.
    at: coordinates of the expression (of the operand for reductions), over the stage's axes.
    where: coordinates in `target`, the buffer written (meaningless for kind "row").
    reduced: axes summed over.
    """

    node: Node
    kind: Literal["row", "column", "store"]
    target: Node
    at: Coords
    where: Coords
    reduced: tuple[Axis, ...]
    reads: list[Read] = field(default_factory=list)

    @property
    def axes(self) -> set[Axis]:
        return set().union(*(c.axes for c in self.at)) if self.at else set()

    def out(self) -> Coords:
        """Coordinates of `node` itself, as another root would read it."""
        if self.kind == "store":
            return self.where
        replacement = {a: Affine(frozenset(), 0) for a in self.reduced}
        return substitute(self.at, replacement)

    def rename(self, replacement: Mapping[Axis, Affine]) -> None:
        self.at = substitute(self.at, replacement)
        self.where = substitute(self.where, replacement)
        for read in self.reads:
            read.coords = substitute(read.coords, replacement)
        reduced: list[Axis] = []
        for axis in self.reduced:
            new = replacement.get(axis)
            reduced.extend([axis] if new is None else (a for a, _ in new.sorted_terms()))
        self.reduced = tuple(reduced)


@dataclass
class Stage:
    """Roots computed in one walk over the same rows. `cols` None means not settled yet."""

    axes: list[Axis]
    cols: list[Axis] | None
    roots: list[Root]

    def rename(self, replacement: Mapping[Axis, Affine]) -> None:
        def renamed(axes: Iterable[Axis]) -> list[Axis]:
            out: dict[Axis, None] = {}
            for axis in axes:
                new = replacement.get(axis)
                for a in [axis] if new is None else [a for a, _ in new.sorted_terms()]:
                    out[a] = None
            return list(out)

        self.axes = renamed(self.axes)
        if self.cols is not None:
            self.cols = renamed(self.cols)
        for root in self.roots:
            root.rename(replacement)

    def settled_cols(self) -> list[Axis]:
        """The column axes: those every row reduction sums over, else the innermost dimension that
        no column sum reduces. Never a run-time size: a row is laid out when it is compiled."""
        if self.cols is not None:
            return self.cols
        kept: list[Axis] = []
        for axis in reversed(self.axes):
            usable = isinstance(axis.extent, int) and all(
                axis not in r.reduced and axis in r.axes for r in self.roots if r.kind == "column"
            )
            if not usable or (kept and axis.family is not kept[-1].family):
                break
            kept.insert(0, axis)
        return kept

    def rows(self) -> list[Axis]:
        cols = self.settled_cols()
        return [a for a in self.axes if a not in cols]

    def columns(self) -> Dim:
        return product(a.extent for a in self.settled_cols())


@dataclass
class RowRegion:
    """A row region; with more than one stage a group region: the block that owns a group (fixed
    values of the `group` axes) runs every stage of it, with a barrier between. alone: what it
    writes and nobody else reads."""

    stages: list[Stage]
    group: list[Axis] = field(default_factory=list)
    name: str = ""
    alone: set[Node] = field(default_factory=set)

    @property
    def roots(self) -> list[Root]:
        return [r for s in self.stages for r in s.roots]

    @property
    def kind(self) -> Literal["rows", "group"]:
        return "group" if len(self.stages) > 1 else "rows"

    def writes(self) -> list[Node]:
        return list(dict.fromkeys(r.target for r in self.roots if r.kind != "row"))

    def reads(self, buffers: set[Node]) -> list[Node]:
        own = set(self.writes())
        seen = {
            read.node: None for r in self.roots for read in r.reads
            if read.node in buffers and (read.node not in own)
        }  # fmt: skip
        return list(seen)


@dataclass(frozen=True)
class Operand:
    """A strided view of a buffer: shape, strides and offset in elements."""

    buffer: Node
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim


@dataclass
class Tail:
    """A row region that a product's kernel does on its tiles before they reach memory.

    region: what it does. ins: the tensors it reads beside the product, as [b, m, n]. outs: what is
    written as [b, m, n], and the root that makes it; None is the product itself, where somebody
    else reads it. sums: the column sums, over m and, unless `each`, over b.
    """

    region: RowRegion
    ins: tuple[tuple[Read, Operand], ...]
    outs: tuple[tuple[Root | None, Operand], ...]
    sums: tuple[Root, ...]
    each: bool


@dataclass
class MatmulRegion:
    """Batched product [b, m, k] @ [b, k, n] of two strided operands; `extras` are what its epilogue
    adds: ("row", [b, 1, n]) or ("tensor", [b, m, n]); then comes the tail."""

    node: Node
    a: Operand
    b: Operand
    extras: tuple[tuple[str, Operand], ...] = ()
    tail: Tail | None = None
    name: str = ""
    kind: Literal["matmul"] = "matmul"

    def writes(self) -> list[Node]:
        if self.tail is None:
            return [self.node]
        kept = [self.node] if any(root is None for root, _ in self.tail.outs) else []
        return [*kept, *self.tail.region.writes()]

    def reads(self, buffers: set[Node]) -> list[Node]:
        extras = [o.buffer for _, o in self.extras]
        tail = [o.buffer for _, o in self.tail.ins] if self.tail else []
        return list(dict.fromkeys([self.a.buffer, self.b.buffer, *extras, *tail]))

    @property
    def flops(self) -> Dim:
        batch, m, k = self.a.shape
        return as_dim(2 * batch * m * k * self.b.shape[2])


@dataclass
class ExternRegion:
    """One aten call left to PyTorch; `items` are the outputs of a multi-output call."""

    node: Node
    items: list[Node]
    operands: list[Operand]
    name: str = ""
    kind: Literal["extern"] = "extern"

    def writes(self) -> list[Node]:
        return [*self.items] or [self.node]

    def reads(self, buffers: set[Node]) -> list[Node]:
        return list(dict.fromkeys(o.buffer for o in self.operands))


Region = RowRegion | MatmulRegion | ExternRegion


@dataclass(frozen=True)
class Merge:
    """One fusion as it happened: two regions, and the one that they became."""

    first: RowRegion | MatmulRegion
    second: RowRegion
    result: RowRegion | MatmulRegion


@dataclass
class GraphPlan:
    """One direction. regions: in execution order. buffers: every node that lives in memory. sizes:
    the run-time sizes of the call it was made for. merges: the fusions in the order they happened,
    which is how ``MEGAFUSE_FUEL`` counts them."""

    graph: Graph
    direction: Literal["forward", "backward"]
    regions: list[Region]
    buffers: set[Node]
    results: list[Operand | None]
    refused: list[WhyNotFused]
    sizes: Mapping[str, int] = field(default_factory=dict)
    merges: list[Merge] = field(default_factory=list)

    def rows_of(self, region: RowRegion, sizes: Mapping[str, int] | None = None) -> int:
        """Rows of the region's first stage; sizes: by default those the plan was made for."""
        rows = product(a.extent for a in region.stages[0].rows())
        return evaluate(rows, self.sizes if sizes is None else sizes)

    def last_use(self) -> dict[Node, int]:
        """Buffer → index of the last region that reads or writes it (outputs: never freed)."""
        kept = {o.buffer for o in self.results if o is not None}
        last: dict[Node, int] = {}
        for i, region in enumerate(self.regions):
            for node in [*region.reads(self.buffers), *region.writes()]:
                last[node] = i
        return {n: i for n, i in last.items() if n not in kept}
