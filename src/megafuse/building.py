"""Nodes out of a traced aten graph: their types, names and origins, and the views among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megafuse.ir import Arg, Dim, Node, Origin, TensorType, as_dim, symbol

BACKWARD = "@backward"
"""Marks the tag of nodes traced during `torch.autograd.grad`; see `capture._Provenance`."""


class Builder:
    """Makes nodes; `names` maps the ShapeEnv's symbols to ours."""

    def __init__(self, env: ShapeEnv, names: dict[sympy.Symbol, sympy.Symbol]) -> None:
        self.env, self.names = env, names
        self.nodes: list[Node] = []
        self.values: dict[torch.fx.Node, Any] = {}
        self._count: dict[str, int] = {}

    # -- types, names and origins

    def dim(self, value: Any) -> Dim:
        if isinstance(value, torch.SymInt):
            expr = self.env.simplify(value.node.expr)
            for s in sorted(expr.free_symbols, key=str):
                self.names.setdefault(s, symbol(f"s{len(self.names)}"))
            return as_dim(expr.xreplace(self.names))
        return as_dim(value)

    def number(self, value: Any) -> Any:
        """A float, or an expression in the run-time sizes (mean over the batch divides by one)."""
        if not isinstance(value, torch.SymFloat):
            return value
        expr = self.env.simplify(value.node.expr)
        for name in ("ToFloat", "TruncToInt"):
            expr = expr.replace(lambda e, n=name: type(e).__name__ == n, lambda e: e.args[0])
        expr = expr.replace(lambda e: type(e).__name__ in ("IntTrueDiv", "FloatTrueDiv"),
                            lambda e: e.args[0] / e.args[1])  # fmt: skip
        for s in sorted(expr.free_symbols, key=str):
            self.names.setdefault(s, symbol(f"s{len(self.names)}"))
        return expr.xreplace(self.names)

    def type_of(self, fx_node: torch.fx.Node, value: Any = None) -> TensorType:
        value = fx_node.meta["val"] if value is None else value
        return TensorType(tuple(self.dim(s) for s in value.shape), value.dtype)

    def origin(self, fx_node: torch.fx.Node) -> Origin:
        op = str(fx_node.target).rsplit(".", 1)[0].removeprefix("torch.ops.")
        tag = fx_node.meta.get("stack_trace") or "|"
        direction: Literal["forward", "backward"]
        direction = "backward" if tag.startswith(BACKWARD) else "forward"
        fields = tag.removeprefix(f"{BACKWARD}|").split("|")
        location, module = fields[0], fields[1] if len(fields) > 1 else ""
        return Origin(op, location or None, module or None, direction)

    def emit(
        self, op: str, args: Sequence[Arg], type: TensorType, origin: Origin, **attrs: Any
    ) -> Node:
        stem = {"matmul": "mm", "reshape": "view", "input": "x"}.get(op, op)
        self._count[stem] = self._count.get(stem, -1) + 1
        node = Node(f"{stem}{self._count[stem]}", op, tuple(args), type, attrs, origin)
        self.nodes.append(node)
        return node

    # -- building blocks shared by the translations

    def reshape(self, x: Node, shape: Sequence[Dim], origin: Origin) -> Node:
        shape = tuple(shape)
        if shape == x.shape:
            return x
        return self.emit("reshape", (x,), TensorType(shape, x.dtype), origin)

    def permute(self, x: Node, order: Sequence[int], origin: Origin) -> Node:
        shape = tuple(x.shape[i] for i in order)
        return self.emit("permute", (x,), TensorType(shape, x.dtype), origin, order=tuple(order))

    def slice(
        self, x: Node, dim: int, start: Dim, stop: Dim, origin: Origin, step: int = 1
    ) -> Node:
        if start == 0 and stop == x.shape[dim] and step == 1:
            return x
        shape = list(x.shape)
        shape[dim] = as_dim(stop - start) if step == 1 else (stop - start + step - 1) // step
        return self.emit("slice", (x,), TensorType(tuple(shape), x.dtype), origin,
                         dim=dim, start=start, stop=stop, step=step)  # fmt: skip

    # -- aten operators that only move elements

    def op_permute(self, fx_node: Any, origin: Origin, x: Node, order: Sequence[int]) -> Node:
        return self.permute(x, [i % len(x.shape) for i in order], origin)

    def op_transpose(self, fx_node: Any, origin: Origin, x: Node, a: int, b: int) -> Node:
        order = list(range(len(x.shape)))
        order[a], order[b] = order[b], order[a]
        return self.permute(x, order, origin)

    def op_t(self, fx_node: Any, origin: Origin, x: Node) -> Node:
        return x if len(x.shape) < 2 else self.permute(x, [1, 0], origin)

    def op_expand(self, fx_node: Any, origin: Origin, x: Node, *_: Any, **__: Any) -> Node:
        type = self.type_of(fx_node)
        x = self.reshape(x, (1,) * (len(type.shape) - len(x.shape)) + x.shape, origin)
        return x if x.shape == type.shape else self.emit("expand", (x,), type, origin)

    def op_slice(self, fx_node: Any, origin: Origin, x: Node, dim: int = 0, start: Any = 0,
                 end: Any = None, step: int = 1) -> Any:  # fmt: skip
        dim %= len(x.shape)
        extent, size = x.shape[dim], self.type_of(fx_node).shape[dim]
        if size == extent:
            return x
        start = 0 if start is None else start
        if isinstance(start, int) and start < 0:
            start = as_dim(start + extent)
        if not isinstance(size, int) and step != 1:
            return NotImplemented
        return self.slice(x, dim, start, as_dim(start + size * step) if step == 1 else
                          start + (size - 1) * step + 1, origin, step)  # fmt: skip

    def op_select(self, fx_node: Any, origin: Origin, x: Node, dim: int, index: Any) -> Node:
        dim %= len(x.shape)
        index = as_dim(index + x.shape[dim]) if isinstance(index, int) and index < 0 else index
        part = self.slice(x, dim, index, as_dim(index + 1), origin)
        return self.reshape(part, x.shape[:dim] + x.shape[dim + 1 :], origin)

    def _split(self, fx_node: Any, origin: Origin, x: Node, dim: int) -> list[Node]:
        dim %= len(x.shape)
        parts, start = [], 0
        for piece in fx_node.meta["val"]:
            size = self.dim(piece.shape[dim])
            parts.append(self.slice(x, dim, start, as_dim(start + size), origin))
            start = as_dim(start + size)
        return parts

    def op_split(self, fx_node: Any, origin: Origin, x: Node, size: Any, dim: int = 0) -> Any:
        return self._split(fx_node, origin, x, dim)

    def op_split_with_sizes(self, fx_node: Any, origin: Origin, x: Node, sizes: Any,
                            dim: int = 0) -> Any:  # fmt: skip
        return self._split(fx_node, origin, x, dim)

    op_unsafe_split, op_unsafe_split_with_sizes = op_split, op_split_with_sizes

    def op_chunk(self, fx_node: Any, origin: Origin, x: Node, chunks: int, dim: int = 0) -> Any:
        return self._split(fx_node, origin, x, dim)

    def op_unbind(self, fx_node: Any, origin: Origin, x: Node, dim: int = 0) -> Any:
        return [self.op_select(fx_node, origin, x, dim, i) for i in range(len(fx_node.meta["val"]))]

    def op_cat(self, fx_node: Any, origin: Origin, parts: list[Node], dim: int = 0) -> Any:
        type = self.type_of(fx_node)
        if any(p.dtype != type.dtype or len(p.shape) != len(type.shape) for p in parts):
            return NotImplemented
        if len(parts) == 1:
            return parts[0]
        return self.emit("cat", parts, type, origin, dim=dim % len(type.shape))

    def op_stack(self, fx_node: Any, origin: Origin, parts: list[Node], dim: int = 0) -> Any:
        type = self.type_of(fx_node)
        dim %= len(type.shape)
        shape = (*type.shape[:dim], 1, *type.shape[dim + 1 :])
        return self.op_cat(fx_node, origin, [self.reshape(p, shape, origin) for p in parts], dim)

    def op_slice_scatter(self, fx_node: Any, origin: Origin, x: Node, y: Node, dim: int = 0,
                         start: Any = 0, end: Any = None, step: int = 1) -> Any:  # fmt: skip
        dim %= len(x.shape)
        start = 0 if start is None else start
        if isinstance(start, int) and start < 0:
            start = as_dim(start + x.shape[dim])
        if step != 1:
            return self._interleave(fx_node, origin, x, y, dim, start, step)
        stop = as_dim(start + y.shape[dim])
        parts = [y]
        if start != 0:
            parts.insert(0, self.slice(x, dim, 0, start, origin))
        if stop != x.shape[dim]:
            parts.append(self.slice(x, dim, stop, x.shape[dim], origin))
        return self.op_cat(fx_node, origin, parts, dim)

    def _interleave(self, fx_node: Any, origin: Origin, x: Node, y: Node, dim: int, start: Any,
                    step: int) -> Any:  # fmt: skip
        """`x` with each `step`-th element from `start` on replaced: one column of [.., step]."""
        extent = x.shape[dim]
        whole = isinstance(extent, int) and isinstance(start, int) and start < step
        if not whole or extent % step or y.shape[dim] != extent // step:
            return NotImplemented
        split = (*x.shape[:dim], extent // step, step, *x.shape[dim + 1 :])
        wide = self.reshape(x, split, origin)
        column = self.reshape(y, (*split[: dim + 1], 1, *split[dim + 2 :]), origin)
        parts = [self.slice(wide, dim + 1, 0, start, origin)] if start else []
        parts.append(column)
        if start + 1 < step:
            parts.append(self.slice(wide, dim + 1, start + 1, step, origin))
        both = self.emit("cat", parts, TensorType(split, x.dtype), origin, dim=dim + 1)
        return self.reshape(both, x.shape, origin)

    def op_select_scatter(self, fx_node: Any, origin: Origin, x: Node, y: Node, dim: int,
                          index: Any) -> Any:  # fmt: skip
        dim %= len(x.shape)
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        return self.op_slice_scatter(fx_node, origin, x, self.reshape(y, shape, origin), dim, index)
