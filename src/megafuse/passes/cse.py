"""Merge equal nodes: the normalised values that forward and backward both compute, mostly."""

from __future__ import annotations

import torch

from megafuse.ir import Arg, Graph, Node, Rewriter


class Cse(Rewriter):
    name = "cse"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[object, Node] = {}

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node.op == "extern" and not _repeatable(node.attrs["target"]):
            return self.keep(node, args)
        arg_keys = tuple(id(a) if isinstance(a, Node) else (type(a), a) for a in args)
        key = (node.op, arg_keys, node.type, repr(sorted(node.attrs.items())))
        if key not in self.seen:
            self.seen[key] = self.keep(node, args)
        return self.seen[key]


def _repeatable(target: str) -> bool:
    """Whether calling it twice is calling it once: not random, and nothing written to."""
    if target == "constant":
        return False
    namespace, packet, overload = target.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    random = torch.Tag.nondeterministic_seeded in op.tags
    return namespace == "aten" and not random and not op._schema.is_mutable


def cse(graph: Graph) -> Graph:
    return Cse().run(graph)
