"""Drop nodes no output depends on; inputs stay."""

from __future__ import annotations

from megafuse.ir import Graph


def dce(graph: Graph) -> Graph:
    live = graph.live()
    nodes = [n for n in graph.nodes if n in live or n.op == "input"]
    return Graph(graph.inputs, nodes, graph.outputs, "dce")
