"""What a legal Graph is; checked after every pass."""

from __future__ import annotations

from typing import Any

from megafuse.errors import InvariantError
from megafuse.ir import FUSABLE, Dim, Graph, Node, as_dim, product
from megafuse.ops import is_pointwise


def check_graph(graph: Graph) -> None:
    """Raise InvariantError unless `graph` is topologically ordered, closed, uniquely named and
    well-typed."""
    seen: set[Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        for operand in node.inputs:
            _require(operand in seen, graph, node, f"uses {operand} before its definition")
        _require(node.name not in names, graph, node, "its name is taken")
        seen.add(node)
        names.add(node.name)
        problem = _type_problem(node)
        _require(problem is None, graph, node, problem or "")
    for node in [*graph.inputs, *(n for n in graph.outputs if n is not None)]:
        _require(node in seen, graph, node, "is an input or output but not among the nodes")


def _require(holds: bool, graph: Graph, node: Node, problem: str) -> None:
    if not holds:
        raise InvariantError(f"after {graph.made_by}: {node.name} = {node.op}: {problem}")


def _same(a: Any, b: Any) -> bool:
    return as_dim(a - b) == 0


def broadcast(shapes: list[tuple[Dim, ...]]) -> tuple[Dim, ...] | None:
    """The shape that `shapes` broadcast to, or None."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for i, extent in enumerate(shape, rank - len(shape)):
            if extent == 1:
                continue
            if result[i] != 1 and not _same(result[i], extent):
                return None
            result[i] = extent
    return tuple(result)


def _type_problem(node: Node) -> str | None:
    shapes = [i.shape for i in node.inputs]
    if node.op not in ("input", "extern", "item"):
        for dtype in (node.dtype, *(i.dtype for i in node.inputs)):
            if dtype not in FUSABLE:
                return f"no generated code handles {dtype}"
    match node.op:
        case "input" | "full" | "extern" | "item":
            return None
        case "reshape":
            same = _same(product(shapes[0]), product(node.shape))
            return None if same else f"{shapes[0]} has another element count than {node.shape}"
        case "permute":
            expected = tuple(shapes[0][i] for i in node.attrs["order"])
        case "expand":
            ok = len(shapes[0]) == len(node.shape)
            ok = ok and broadcast([shapes[0], node.shape]) == node.shape
            return None if ok else f"{shapes[0]} does not expand to {node.shape}"
        case "slice":
            return None if len(shapes[0]) == len(node.shape) else "changes rank"
        case "cat":
            dim = node.attrs["dim"]
            total = as_dim(sum(s[dim] for s in shapes))
            expected = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
        case "sum" | "amax" | "amin":
            dims = node.attrs["dims"]
            expected = tuple(1 if i in dims else s for i, s in enumerate(shapes[0]))
        case "matmul":
            (a, m, k), (b, k2, n) = shapes[:2]
            if not (_same(a, b) and _same(k, k2)):
                return f"{shapes[0]} @ {shapes[1]} do not fit"
            expected = (a, m, n)
        case _ if is_pointwise(node):
            expected = broadcast(shapes) or node.shape
            if broadcast(shapes) is None:
                return f"{shapes} do not broadcast"
        case _:
            return "unknown operator"
    same = len(expected) == len(node.shape) and all(map(_same, expected, node.shape))
    return None if same else f"should have shape {expected}, has {node.shape}"
