"""The pipeline: which passes run on the joint graph, in which order, verified after each."""

from __future__ import annotations

from collections.abc import Callable

from megafuse.invariants import check_graph
from megafuse.ir import Graph
from megafuse.passes.cse import cse
from megafuse.passes.dce import dce
from megafuse.passes.epilogue import fuse_epilogues
from megafuse.passes.in_memory import in_memory
from megafuse.passes.simplify import simplify

Pass = Callable[[Graph], Graph]
PIPELINE: tuple[Pass, ...] = (dce, simplify, cse, dce, in_memory)
EPILOGUES: tuple[Pass, ...] = (fuse_epilogues, simplify, cse, dce)


def run(
    graph: Graph, observe: Callable[[Graph], None] = lambda _: None, epilogues: bool = False
) -> Graph:
    """Run PIPELINE, then EPILOGUES where products have them; `observe` sees the graph after every
    pass."""
    check_graph(graph)
    observe(graph)
    for apply in (*PIPELINE, *(EPILOGUES if epilogues else ())):
        graph = apply(graph)
        check_graph(graph)
        observe(graph)
    return graph
