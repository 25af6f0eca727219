"""What PyTorch runs for a call one operator at a time: what a plan is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from megafuse.ir import Dim, Origin, as_dim, product


@dataclass(frozen=True)
class Operator:
    """One aten call that is no view. sources: names of the operators and inputs (`x0`, ..., then
    `grad0`, ...) it reads, through views; read, written: bytes, each tensor once."""

    name: str
    origin: Origin
    sources: tuple[str, ...]
    read: Dim
    written: Dim


def operators(
    traced: torch.fx.GraphModule,
    primals: int,
    dim: Callable[[Any], Dim],
    origin: Callable[[torch.fx.Node], Origin],
) -> list[Operator]:
    """The operators of a traced call in order. primals: how many placeholders are the call's own
    tensors; dim, origin: those of the importer that knows the trace."""

    def nbytes(value: Any) -> Dim:
        flat = [v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
        return sum(product(dim(s) for s in v.shape) * v.dtype.itemsize for v in flat)

    result: list[Operator] = []
    named: dict[torch.fx.Node, tuple[str, ...]] = {}
    places = 0
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            named[node] = (f"x{places}" if places < primals else f"grad{places - primals}",)
            places += 1
            continue
        operands = [n for n in node.all_input_nodes if "val" in n.meta]
        sources = tuple(dict.fromkeys(s for n in operands for s in named.get(n, ())))
        if not _computes(node):
            size = isinstance(node.meta.get("val"), (int, torch.SymInt))
            named[node] = () if size else sources
            continue
        named[node] = (node.name,)
        read = as_dim(sum(nbytes(n.meta["val"]) for n in operands))
        written = as_dim(nbytes(node.meta["val"]))
        result.append(Operator(node.name, origin(node), sources, read, written))
    return result


def _computes(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return False
    if "val" not in node.meta or isinstance(node.meta["val"], (int, torch.SymInt)):
        return False
    return not str(node.target).startswith(("aten._unsafe_view", "aten.detach"))
