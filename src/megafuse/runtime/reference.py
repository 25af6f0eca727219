"""A graph in plain PyTorch: the printed source, executed. The yardstick for generated code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megafuse import ops
from megafuse.ir import Graph, print_graph


def source(graph: Graph) -> str:
    """Runnable Python of `graph`: a function `graph(*inputs)` returning a list."""
    return print_graph(graph, ops.spell)


def interpret(graph: Graph) -> Callable[..., list[Any]]:
    """A function that computes `graph` operator by operator, rounding as eager does."""
    namespace: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
    exec(compile(source(graph), f"<megafuse graph after {graph.made_by}>", "exec"), namespace)
    return namespace["graph"]  # type: ignore[no-any-return]


def run(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[Any]:
    with torch.no_grad():
        return interpret(graph)(*inputs)
