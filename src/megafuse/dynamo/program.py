"""Put fused parts and PyTorch's calls together again as one function that AOTAutograd can call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from megafuse.dynamo.part import Part
from megafuse.dynamo.reader import Reader


def release(args: list[Any]) -> None:
    """Empty the caller's list: each tensor then lives as long as the program needs it."""
    args.clear()


def pack(*args: Any) -> list[Any]:
    """What a part is called with; the program itself then holds none of it any more."""
    return list(args)


def assemble(reader: Reader, items: list[Part | fx.Node]) -> fx.GraphModule:
    """A program of one list argument, which it empties, with `items` in their order.

    Views and sizes are computed where they are first needed.
    """
    source, graph = reader.traced.graph, fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    parts: dict[str, Any] = {}
    boxed = graph.placeholder("args")
    for i, placeholder in enumerate(source.find_nodes(op="placeholder")):
        made[placeholder] = graph.call_function(operator.getitem, (boxed, i))
        made[placeholder].meta = dict(placeholder.meta)
    graph.call_function(release, (boxed,))

    def value(node: fx.Node) -> fx.Node:
        if node not in made:
            if node.op == "get_attr":
                parts[str(node.target)] = operator.attrgetter(str(node.target))(reader.traced)
            made[node] = graph.node_copy(node, value)
        return made[node]

    def size(name: str) -> fx.Node:
        node, dim = reader.sizes[name]
        if dim is None:
            return value(node)
        return graph.call_method("size", (value(node), dim))

    for item in items:
        if isinstance(item, fx.Node):
            value(item)
            continue
        name = f"fused_{sum(isinstance(p, Part) for p in parts.values())}"
        parts[name] = item
        args = (*map(size, item.sizes), *map(value, item.inputs))
        results = graph.call_module(name, (graph.call_function(pack, args),))
        for i, output in enumerate(item.outputs):
            made[output] = graph.call_function(operator.getitem, (results, i))
            made[output].meta = dict(output.meta)
    (returned,) = source.find_nodes(op="output")
    graph.output(fx.map_arg(returned.args[0], value))
    return fx.GraphModule(parts or nn.Module(), graph, "MegafuseProgram")


def boxed(program: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`program` as AOTAutograd wants it."""

    def run(args: list[Any]) -> Any:
        return forward(args)

    forward = program.forward
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
