"""Grow regions over one direction's graph.

Every value that must be computed is a root; roots start alone and are merged, in topological order,
with the regions they read from or share reads with, wherever a rule allows it. Values nobody has to
keep are computed where they are read, through whatever views lie between. When a plan turns out to
need a value in memory (another block reads it, or recomputing it in several places would move more
bytes than writing it) the planner adds it to the buffers and starts over; buffers only grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megafuse.errors import InvariantError
from megafuse.fusion import cost
from megafuse.fusion.align import Mismatch
from megafuse.fusion.columns import widen
from megafuse.fusion.merging import merged_regions, related
from megafuse.fusion.plan import (
    ExternRegion,
    GraphPlan,
    MatmulRegion,
    Merge,
    Region,
    Root,
    RowRegion,
    Stage,
    WhyNotFused,
)
from megafuse.fusion.roots import (
    Materialise,
    cat_pieces,
    is_column_sum,
    operand_view,
    reduction_stage,
    store_stage,
)
from megafuse.fusion.rules import same_rows
from megafuse.fusion.tails import absorb
from megafuse.ir import Graph, Node
from megafuse.ops import is_pointwise, is_reduction, is_view


@dataclass
class _State:
    """One attempt with a fixed set of buffers."""

    buffers: set[Node]
    regions: list[Region] = field(default_factory=list)
    refused: dict[tuple[Node, Node], WhyNotFused] = field(default_factory=dict)
    merges: list[Merge] = field(default_factory=list)


class Planner:
    """fuel: how many merges may happen (None: any number). tails: whether products have them."""

    def __init__(
        self,
        graph: Graph,
        direction: Literal["forward", "backward"],
        sizes: Mapping[str, int],
        fuel: int | None = None,
        tails: bool = False,
    ) -> None:
        self.graph, self.direction, self.sizes, self.fuel = graph, direction, sizes, fuel
        self.tails = tails
        self.users = graph.users()
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    def plan(self) -> GraphPlan:
        buffers = self._initial_buffers()
        chosen, inline = set[Node](), set[Node]()
        while True:
            try:
                state = self._grow(buffers)
                more = cost.worth_writing(state.regions, state.buffers | inline, self.sizes)
                chosen |= more
                more = more or self._out_of_reach(state)
                results = [None if o is None else operand_view(o, buffers | more)
                           for o in self.graph.outputs]  # fmt: skip
            except Materialise as need:
                more = {need.node}
            if more and more <= buffers:
                raise InvariantError(f"planning does not get on: {more} are in memory already")
            buffers |= more
            if not more:
                # A value written for readers that have since joined its own walk needs no memory.
                idle = self._unread(state) & chosen & buffers
                if not idle:
                    break
                inline |= idle
                buffers -= idle
        regions, refused = self._ordered(state.regions), list(state.refused.values())
        if self.tails:
            regions, merges, apart = absorb(regions, buffers, self.sizes, results, self._left)
            state.merges += merges
            refused += apart
        letter = "F" if self.direction == "forward" else "B"
        for i, region in enumerate(regions, 1):
            region.name = f"{letter}{i}"
            if isinstance(region, MatmulRegion) and region.tail is not None:
                region.tail.region.name = region.name
                if not region.tail.sums:
                    widen(region.tail.region)
            if isinstance(region, RowRegion):
                widen(region)
                others = {n for r in regions if r is not region for n in r.reads(buffers)}
                others |= {n for r in regions if r is not region for n in r.writes()}
                others |= {o.buffer for o in results if o is not None}
                region.alone = set(region.writes()) - others
        return GraphPlan(
            self.graph, self.direction, regions, buffers, results, refused, self.sizes,
            state.merges,
        )  # fmt: skip

    # -- buffers

    def _initial_buffers(self) -> set[Node]:
        buffers: set[Node] = set()
        wanted = [o for o in self.graph.outputs if o is not None]
        for node in self.graph.nodes:
            if node.op in ("input", "matmul", "extern", "item"):
                buffers.add(node)
            if node.op == "cat" or is_column_sum(node):
                buffers.add(node)
            if node.op in ("matmul", "extern"):
                wanted.extend(node.inputs)
        # Outputs come in the order their extents have in memory: a permuted one is stored permuted.
        permuted = {o for o in self.graph.outputs if o is not None and o.op == "permute"}
        for node in wanted:
            base = node
            while is_view(base) and base not in permuted:
                base = base.inputs[0]
            buffers.add(base)
        # A column sum that is one whole piece of a concatenation is finished straight into it.
        for node in self.graph.nodes:
            if node.op == "cat":
                buffers -= {p for p in node.inputs if self._finished_into(p, node)}
        return buffers

    def _finished_into(self, part: Node, cat: Node) -> bool:
        return is_column_sum(part) and self.users[part] == [cat] and part not in self.graph.outputs

    def _out_of_reach(self, state: _State) -> set[Node]:
        """Reductions read where they are not at hand: the value to keep is the one that grows."""
        more: set[Node] = set()
        for region in state.regions:
            if not isinstance(region, RowRegion):
                continue
            for stage in region.stages:
                made = same_rows.produced(stage)
                for root in stage.roots:
                    for read in root.reads:
                        if read.node in state.buffers:
                            continue
                        if read.node in made and made[read.node].out() == read.coords:
                            continue
                        more |= self._frontier(root, read.node, state.buffers)
        return more

    def _unread(self, state: _State) -> set[Node]:
        """Buffers whose only readers compute them in the same walk."""
        written: dict[Node, Stage] = {}
        read: set[Node] = {n for r in state.regions if not isinstance(r, RowRegion)
                           for n in r.reads(state.buffers)}  # fmt: skip
        stages = [s for r in state.regions if isinstance(r, RowRegion) for s in r.stages]
        for stage in stages:
            written |= {r.node: stage for r in stage.roots if r.kind == "store"}
        for stage in stages:
            for root in stage.roots:
                read |= {r.node for r in root.reads if written.get(r.node) is not stage}
        return set(written) - read

    def _frontier(self, root: Root, reduction: Node, buffers: set[Node]) -> set[Node]:
        """The smallest values between `reduction` and `root`'s elements: rstd, not its square."""
        reaches: dict[Node, bool] = {}

        def reaching(node: Node) -> bool:
            if node not in reaches:
                reaches[node] = node is reduction or (
                    not (node in buffers or is_reduction(node))
                    and any(reaching(i) for i in node.inputs)
                )
            return reaches[node]

        result: set[Node] = set()
        small = reduction.type.numel

        def descend(node: Node) -> None:
            while is_view(node):
                node = node.inputs[0]
            if not reaching(node):
                return
            if node is reduction or (node.type.numel == small and is_pointwise(node)):
                result.add(node)
                return
            for operand in node.inputs:
                descend(operand)

        for start in root.node.inputs:
            descend(start)
        return result or {reduction}

    # -- growing

    def _grow(self, buffers: set[Node]) -> _State:
        state = _State(set(buffers))
        self._left = self.fuel
        for node in self.graph.nodes:
            for region in self._start(node, state.buffers):
                state.regions.append(region)
                if isinstance(region, RowRegion):
                    self._merge_everywhere(region, state)
        return state

    def _start(self, node: Node, buffers: set[Node]) -> list[Region]:
        if node.op == "matmul":
            a, b, *rest = (operand_view(i, buffers) for i in node.inputs)
            extras = tuple(zip(node.attrs.get("epilogue", ()), rest, strict=True))
            return [MatmulRegion(node, a, b, extras)]
        if node.op == "extern":
            items = [u for u in self.users[node] if u.op == "item"]
            operands = [operand_view(i, buffers) for i in node.inputs]
            return [ExternRegion(node, items, operands)]
        if node.op == "cat":
            return [
                RowRegion([store_stage(part, node, shift, buffers)])
                for part, shift in cat_pieces(node) if not self._finished_into(part, node)
            ]  # fmt: skip
        regions: list[Region] = []
        if is_reduction(node):
            target, shift = node, {}
            for user in self.users[node]:
                if user.op == "cat" and self._finished_into(node, user):
                    target = user
                    shift = next(s for p, s in cat_pieces(user) if p is node)
            stage = reduction_stage(node, target, shift, buffers)
            if node in buffers and not is_column_sum(node):
                store = store_stage(node, node, {}, buffers)
                stage = same_rows.merge(stage, store, same_rows.pairs_between(stage, store))
            regions.append(RowRegion([stage]))
        elif node in buffers and (is_pointwise(node) or is_view(node)):
            regions.append(RowRegion([store_stage(node, node, {}, buffers)]))
        return regions

    def _merge_everywhere(self, region: RowRegion, state: _State) -> None:
        """Merge `region` with every earlier one a rule allows, nearest first."""
        tried: set[int] = set()
        while True:
            others = [r for r in reversed(state.regions)
                      if isinstance(r, RowRegion) and r is not region and id(r) not in tried]
            merged = None
            for other in others:
                tried.add(id(other))
                merged = self._try(other, region, state)
                if merged is not None:
                    break
            if merged is None:
                return
            state.regions = [r for r in state.regions if r is not region and r is not other]
            state.regions.append(merged)
            region = merged

    def _try(self, x: RowRegion, y: RowRegion, state: _State) -> RowRegion | None:
        """x is the earlier region, y holds the newest root."""
        if not related(x, y) or (self._left is not None and self._left <= 0):
            return None
        between = self._between(x, y, state)
        if between is not None:
            self._refuse(x, y, state, f"{between} lies between them and needs the first complete")
            return None
        try:
            merged = merged_regions(x, y)
        except Mismatch as reason:
            self._refuse(x, y, state, str(reason))
            return None
        state.merges.append(Merge(x, y, merged))
        if self._left is not None:
            self._left -= 1
        return merged

    def _between(self, x: RowRegion, y: RowRegion, state: _State) -> str | None:
        """Some region on a path from one to the other, if any: merging would make a cycle."""
        made = self._makers(state.regions)
        for start, end in ((y, x), (x, y)):
            stack = [r for r in self._sources(start, made) if r is not end and r is not start]
            seen: set[int] = set()
            while stack:
                region = stack.pop()
                if id(region) in seen:
                    continue
                seen.add(id(region))
                for source in self._sources(region, made):
                    if source is end:
                        return _label(region)
                    if source is not start:
                        stack.append(source)
        return None

    def _makes(self, region: Region) -> list[Node]:
        if isinstance(region, RowRegion):  # a store writes its target; its node may be another's
            return [n for r in region.roots
                    for n in ([r.target] if r.kind == "store" else [r.node, r.target])]  # fmt: skip
        return region.writes()

    def _makers(self, regions: list[Region]) -> dict[Node, list[Region]]:
        """Who makes each value; the parts of a concatenation may come from several regions."""
        made: dict[Node, list[Region]] = {}
        for region in regions:
            for node in dict.fromkeys(self._makes(region)):
                made.setdefault(node, []).append(region)
        return made

    def _sources(self, region: Region, made: dict[Node, list[Region]]) -> list[Region]:
        if isinstance(region, RowRegion):
            nodes = [read.node for r in region.roots for read in r.reads]
        else:
            nodes = region.reads(set())
        found = {id(r): r for n in nodes for r in made.get(n, ()) if r is not region}
        return list(found.values())

    def _refuse(self, x: RowRegion, y: RowRegion, state: _State, reason: str) -> None:
        a, b = x.roots[-1].node, y.roots[-1].node
        state.refused[a, b] = WhyNotFused(a.name, b.name, reason)

    def _ordered(self, regions: list[Region]) -> list[Region]:
        """Topological, earliest first by the graph's own order."""
        made = self._makers(regions)
        rank = {id(r): max(self.order[n] for n in self._makes(r) if n in self.order)
                for r in regions}  # fmt: skip
        done: set[int] = set()
        result: list[Region] = []
        pending = sorted(regions, key=lambda r: rank[id(r)])
        while pending:
            ready = next(r for r in pending
                         if all(id(s) in done for s in self._sources(r, made)))  # fmt: skip
            pending.remove(ready)
            done.add(id(ready))
            if isinstance(ready, RowRegion):
                for stage in ready.stages:
                    stage.roots.sort(key=lambda r: self.order[r.node])
            result.append(ready)
        return result


def _label(region: Region) -> str:
    if isinstance(region, MatmulRegion):
        return f"the product {region.node.origin}"
    if isinstance(region, ExternRegion):
        return str(region.node.origin)
    return str(region.roots[-1].node.origin)
