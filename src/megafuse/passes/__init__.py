"""The pipeline: which passes run on the joint graph, in which order, verified after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from megafuse.invariants import check_graph
from megafuse.ir import Graph
from megafuse.passes.batch import batch
from megafuse.passes.channels_last import channels_last
from megafuse.passes.cse import cse
from megafuse.passes.dce import dce
from megafuse.passes.epilogue import fuse_epilogues
from megafuse.passes.in_memory import in_memory
from megafuse.passes.operands import copied_operands
from megafuse.passes.pieces import pieces
from megafuse.passes.pitched import pitched
from megafuse.passes.simplify import simplify
from megafuse.passes.turned import turned_products
from megafuse.passes.whole import whole_products

Pass = Callable[[Graph], Graph]
PIPELINE: tuple[Pass, ...] = (
    dce, simplify, cse, batch, dce, simplify, pieces, simplify, cse, dce, in_memory,
)  # fmt: skip
EPILOGUES: tuple[Pass, ...] = (fuse_epilogues, simplify, cse, dce)
LAST: tuple[Pass, ...] = (turned_products, dce, whole_products, simplify)
COPIES: tuple[Pass, ...] = (copied_operands, dce)  # a simplification would drop the copies


def run(
    graph: Graph,
    observe: Callable[[Graph], None] = lambda _: None,
    epilogues: bool = False,
    on_gpu: bool = False,
    sizes: Mapping[str, int] = {},
) -> Graph:
    """Run PIPELINE, EPILOGUES where products have them, LAST, channels_last on a GPU, COPIES, and
    pitched where products have epilogues; `observe` sees the graph after every pass. sizes: the
    run-time sizes of the call at hand."""
    check_graph(graph)
    observe(graph)
    extra, layouts = EPILOGUES if epilogues else (), (channels_last,) if on_gpu else ()
    rows = (partial(pitched, sizes=sizes),) if epilogues else ()
    for apply in (*PIPELINE, *extra, *LAST, *layouts, *COPIES, *rows):
        graph = apply(graph)
        check_graph(graph)
        observe(graph)
    return graph
