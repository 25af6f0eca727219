"""Reshapes that no loop addresses become views of memory.

Before → after:
    reshape([4, 6] → [6, 4])  → extern aten.reshape of the tensor in memory

An element's place in [4, 6] is no affine function of its place in [6, 4]: neither 4 nor 6 divides
the other. Extents that do divide stay addressing. PyTorch's reshape costs nothing where the
elements lie together, and copies where they do not (a window of a larger tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from megafuse.ir import Arg, Dim, Graph, Node, Ref, Rewriter, as_dim

RESHAPE = "aten.reshape.default"


class _InMemory(Rewriter):
    name = "in_memory"

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node.op != "reshape" or divides(node.inputs[0].shape, node.shape):
            return self.keep(node, args)
        call = {"call_args": [Ref(0), list(node.shape)], "call_kwargs": {}, "multiple": False}
        attrs = {"target": RESHAPE, **call}
        return self._append(replace(node, op="extern", args=args, attrs=attrs))


def divides(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether both shapes are products of the same finer extents in the same order."""
    left, right = [d for d in a if d != 1], [d for d in b if d != 1]
    while left and right:
        x, y = left.pop(), right.pop()
        if as_dim(x - y) == 0:
            continue
        if (rest := _quotient(x, y)) is not None:
            left.append(rest)
        elif (rest := _quotient(y, x)) is not None:
            right.append(rest)
        else:
            return False
    return True


def _quotient(x: Dim, y: Dim) -> Dim | None:
    """x / y where that is an integer for all run-time sizes."""
    if isinstance(x, int) and isinstance(y, int):
        return x // y if x % y == 0 else None
    rest = sympy.cancel(sympy.sympify(x) / sympy.sympify(y))
    return as_dim(rest) if rest.is_integer else None


def in_memory(graph: Graph) -> Graph:
    return _InMemory().run(graph)
