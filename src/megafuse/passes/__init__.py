"""The pipeline: which passes run on the joint graph, in which order, verified after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from megafuse.invariants import check_graph
from megafuse.ir import Graph
from megafuse.passes.cse import cse
from megafuse.passes.dce import dce
from megafuse.passes.epilogue import fuse_epilogues
from megafuse.passes.operands import copied_operands
from megafuse.passes.pieces import pieces
from megafuse.passes.simplify import simplify
from megafuse.passes.whole import whole_products

Pass = Callable[[Graph], Graph]
Biases = Literal["kernel", "call", "apart"]
PIPELINE: tuple[Pass, ...] = (dce, simplify, pieces, simplify, cse, dce)
AFTER: dict[Biases, tuple[Pass, ...]] = {
    "kernel": (fuse_epilogues, dce, whole_products, simplify, cse, dce),
    "call": (whole_products, simplify, dce),
    "apart": (),
}
LAST: tuple[Pass, ...] = (copied_operands, dce)


def run(
    graph: Graph, observe: Callable[[Graph], None] = lambda _: None, biases: Biases = "apart"
) -> Graph:
    """Run PIPELINE, then what settles where 16-bit products get their biases: in the product's own
    kernel where it can be, else in one PyTorch call with it, or apart; and LAST. `observe` sees the
    graph after every pass."""
    check_graph(graph)
    observe(graph)
    for apply in (*PIPELINE, *AFTER[biases], *LAST):
        graph = apply(graph)
        check_graph(graph)
        observe(graph)
    return graph
