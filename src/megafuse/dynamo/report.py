"""What became of a compiled model: fused parts with their regions, and what PyTorch still runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafuse.fusion.describe import computed
from megafuse.fusion.plan import GraphPlan, MatmulRegion, Region, RowRegion
from megafuse.ir import Node


@dataclass(frozen=True)
class LeftOperator:
    """An operator that PyTorch runs: aten name, the user's file:line, and why it is not fused."""

    name: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.place}".strip() + f": {self.reason}"


@dataclass
class GraphReport:
    """One graph that AOTAutograd handed over. direction: forward (of a training step), backward, or
    inference. parts: the plan of each fused part. code: the program that calls parts and PyTorch.
    """

    direction: str
    parts: list[GraphPlan]
    left: list[LeftOperator]
    code: str

    @property
    def fused_operators(self) -> int:
        """Pointwise operators and reductions inside row regions."""
        return sum(len(computed(r)) for p in self.parts for r in p.regions
                   if isinstance(r, RowRegion))  # fmt: skip

    @property
    def row_regions(self) -> int:
        return sum(isinstance(r, RowRegion) for p in self.parts for r in p.regions)

    def __str__(self) -> str:
        lines = [
            f"{self.direction}: {_count(self.fused_operators, 'operator')} in "
            f"{_count(self.row_regions, 'generated kernel')}, "
            f"{_count(len(self.parts), 'fused part')}; "
            f"{_count(len(self.left), 'call')} left to PyTorch"
        ]
        for i, plan in enumerate(self.parts):
            lines.append(f"  fused_{i}")
            for region in plan.regions:
                text = _described(region)
                lines.append(f"    {region.name:<4}{region.kind:<7} {text}")
        if self.left:
            lines.append("  PyTorch")
            lines += [f"    {n} x {text}" if n > 1 else f"    {text}"
                      for text, n in _counted([str(o) for o in self.left])]  # fmt: skip
        return "\n".join(lines)


@dataclass
class Report:
    """Everything a backend compiled since it was made or reset, in order."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def left(self) -> list[LeftOperator]:
        return [o for g in self.graphs for o in g.left]

    def __str__(self) -> str:
        if not self.graphs:
            return "megafuse: nothing compiled yet"
        return "\n".join(f"graph {i}, {graph}" for i, graph in enumerate(self.graphs))


def _described(region: Region) -> str:
    nodes = computed(region)
    if isinstance(region, RowRegion):
        what = _count(len(nodes), "operator")
    else:
        what = "product" if isinstance(region, MatmulRegion) else str(region.node.attrs["target"])
    return f"{what} from {_places(nodes)}" if nodes else "copies"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _counted(texts: list[str]) -> list[tuple[str, int]]:
    return [(text, texts.count(text)) for text in dict.fromkeys(texts)]


def _places(nodes: list[Node], most: int = 4) -> str:
    def place(node: Node) -> str:
        origin = node.origin
        return (origin.location or origin.op) + (f" ({origin.module})" if origin.module else "")

    places = list(dict.fromkeys(map(place, nodes)))
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
