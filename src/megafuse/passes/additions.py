"""Additions to a product's result, seen in the product's own axes.

A product's result reaches the addition through views (the reshape of a linear layer on [b, t, d],
a transposition of tokens and channels); the other operand is pulled back through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megafuse.ir import Arg, Dim, Node, Rewriter, TensorType

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Addition:
    """`node` = views(`product`) + `other`. views: from the product outwards."""

    product: Node
    views: tuple[Node, ...]
    other: Node


def additions(
    node: Node, args: Sequence[Arg], alone: Callable[[Node], bool]
) -> Iterator[Addition]:
    """The ways to read `node`, a sum of `args`, as an addition to a product of its own shape and
    dtype; `alone` says whether nothing but its one user reads a node."""
    if len(node.inputs) != 2:
        return
    a, b = args
    assert isinstance(a, Node) and isinstance(b, Node)
    for product, other in ((a, b), (b, a)):
        views: list[Node] = []
        while product.op in ("reshape", "permute") and alone(product):
            views.insert(0, product)
            product = product.inputs[0]
        seen = views[-1] if views else product
        same = seen.shape == node.shape and other.dtype == node.dtype
        if product.op == "matmul" and alone(product) and same:
            yield Addition(product, tuple(views), other)


def pulled(addition: Addition, emit: Rewriter) -> tuple[str, Node] | None:
    """(kind, operand) of the addition in the product's axes: "row" [batch, 1, n] or "tensor"
    [batch, m, n]. None when it is neither, or when it would be read across its rows."""
    shape = addition.views[-1].shape if addition.views else addition.product.shape
    x = addition.other
    if len(x.shape) > len(shape):
        return None
    x = _reshaped(x, (1,) * (len(shape) - len(x.shape)) + x.shape, emit)
    for view in reversed(addition.views):
        inner, outer = view.inputs[0].shape, view.shape
        rank = len(outer)
        if view.op == "permute":
            order = view.attrs["order"]
            if order[-1] != rank - 1:
                return None
            back = tuple(order.index(i) for i in range(rank))
            moved = tuple(x.shape[i] for i in back)
            x = emit.emit("permute", (x,), TensorType(moved, x.dtype), x.origin, order=back)
        elif x.shape == outer:
            x = _reshaped(x, inner, emit)
        elif x.shape[:-1] == (1,) * (rank - 1) and inner[-1] == x.shape[-1] == outer[-1]:
            x = _reshaped(x, (1,) * (len(inner) - 1) + (inner[-1],), emit)
        else:
            return None
    batch, m, n = addition.product.shape
    if x.shape == (batch, m, n):
        return "tensor", x
    return ("row", x) if x.shape == (batch, 1, n) else None


def restored(result: Node, addition: Addition, emit: Rewriter) -> Node:
    """`result`, in the product's axes, seen through the addition's views."""
    for view in addition.views:
        attrs = {"order": view.attrs["order"]} if view.op == "permute" else {}
        result = emit.emit(view.op, (result,), view.type, view.origin, **attrs)
    return result


def _reshaped(x: Node, shape: tuple[Dim, ...], emit: Rewriter) -> Node:
    if x.shape == shape:
        return x
    return emit.emit("reshape", (x,), TensorType(shape, x.dtype), x.origin)
