"""A traced aten graph, translated into the small vocabulary of `megafuse.ir`.

Views become reshape / permute / expand / slice, reductions keep their dimensions, matrix products
become one batched `matmul`, copies vanish, and everything unknown is kept whole as an `extern`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megafuse.errors import CaptureError
from megafuse.ir import (
    FUSABLE,
    Arg,
    Dim,
    Graph,
    Node,
    Origin,
    Ref,
    TensorType,
    as_dim,
    symbol,
)
from megafuse.ops import pointwise

FOREIGN_TENSOR = (
    " A tensor that is neither a parameter, a buffer nor an argument takes part: register it as a "
    "buffer, or pass it (or the module that holds it) as an argument."
)

CAST = "@cast"
"""Ends the tag of casts the user wrote: they round in registers too."""

BACKWARD = "@backward"
"""Marks the tag of nodes traced during `torch.autograd.grad`; see `provenance.Provenance`."""

_SAME = {"clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "_reshape_alias"}
_FULLS = {"full": None, "zeros": 0, "ones": 1, "full_like": None, "zeros_like": 0, "ones_like": 1,
          "scalar_tensor": None, "new_zeros": 0, "new_ones": 1, "new_full": None,
          # what a functionalised in-place operator starts from, and then overwrites
          "empty_like": 0, "new_empty": 0, "new_empty_strided": 0}  # fmt: skip


class Importer:
    """Translates one traced graph; `names` maps the ShapeEnv's symbols to ours."""

    def __init__(self, env: ShapeEnv, names: dict[sympy.Symbol, sympy.Symbol]) -> None:
        self.env, self.names = env, names
        self.nodes: list[Node] = []
        self.values: dict[torch.fx.Node, Any] = {}
        self._count: dict[str, int] = {}

    def run(self, traced: torch.fx.GraphModule, primals: int) -> Importer:
        inputs: list[Node] = []
        outputs: list[Node | None] = []
        for fx_node in traced.graph.nodes:
            if fx_node.op == "placeholder":
                index = len(inputs)
                kind = f"x{index}" if index < primals else f"grad{index - primals}"
                node = Node(kind, "input", (), self.type_of(fx_node), {"index": index},
                            Origin("input"))  # fmt: skip
                self.nodes.append(node)
                inputs.append(node)
                self.values[fx_node] = node
            elif fx_node.op == "get_attr":
                self.values[fx_node] = self._constant(traced, fx_node)
            elif fx_node.op == "call_function":
                self.values[fx_node] = self._translate(fx_node)
            elif fx_node.op == "output":
                outputs = [None if v is None else self.values[v] for v in fx_node.args[0]]
        self.graph = Graph(inputs, self.nodes, outputs)
        return self

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

    def _arg(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, torch.SymInt):
            return self.dim(value)
        if isinstance(value, torch.SymFloat):
            return self.number(value)
        if isinstance(value, (list, tuple)):
            return [self._arg(v) for v in value]
        return value

    # -- the translations

    def _translate(self, fx_node: torch.fx.Node) -> Any:
        value = fx_node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return self.dim(value)
        if isinstance(value, (torch.SymFloat, float)):
            return self.number(value)
        if fx_node.target is operator.getitem:
            whole, index = self._arg(fx_node.args[0]), fx_node.args[1]
            if isinstance(whole, Node):
                if fx_node.meta.get("val") is None:
                    return None  # convolution_backward gives no gradient nobody wants
                return self.emit("item", (whole,), self.type_of(fx_node), whole.origin, index=index)
            return whole[index]
        target: Any = fx_node.target
        name = target.overloadpacket._qualified_op_name.split("::")[-1]
        args = [self._arg(a) for a in fx_node.args]
        kwargs = {k: self._arg(v) for k, v in fx_node.kwargs.items()}
        origin = self.origin(fx_node)
        if target.namespace == "aten":
            handler: Callable[..., Any] | None = getattr(self, f"op_{name}", None)
            if name in _SAME:
                return args[0]
            if not _all_fusable([value, args, kwargs]):
                return self._extern(fx_node, args, kwargs, origin)
            if name in _RESHAPES:
                return self.reshape(args[0], self.type_of(fx_node).shape, origin)
            if name in _FULLS:
                return self._full(fx_node, name, args, kwargs, origin)
            if handler is not None:
                result = handler(fx_node, origin, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            elif name in pointwise.BY_ATEN:
                op = pointwise.BY_ATEN[name].name
                result = self._pointwise(fx_node, op, args, kwargs, origin)
                if result is not NotImplemented:
                    return result
        return self._extern(fx_node, args, kwargs, origin)

    def _pointwise(
        self, fx_node: torch.fx.Node, op: str, args: list[Any], kwargs: dict[str, Any],
        origin: Origin,
    ) -> Any:  # fmt: skip
        type = self.type_of(fx_node)
        alpha = kwargs.get("alpha", 1)
        arity = pointwise.TABLE[op].arity
        if kwargs.keys() - {"alpha"} or len(args) != arity:
            return NotImplemented
        if type.dtype == torch.bool and op == "add":  # True + True is True, not 2
            return NotImplemented
        if alpha != 1:
            scaled = args[1]
            if isinstance(scaled, Node):
                scaled_type = TensorType(scaled.shape, type.dtype)
                args[1] = self.emit("mul", (scaled, alpha), scaled_type, origin)
            else:
                args[1] = scaled * alpha
        return self.emit(op, args, type, origin)

    def op__to_copy(self, fx_node: Any, origin: Origin, x: Node, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None) or x.dtype
        device = kwargs.pop("device", None)
        if device is not None and torch.device(device).type != "meta":
            return NotImplemented
        if dtype == x.dtype:
            return x
        written = str(fx_node.meta.get("stack_trace") or "").endswith(f"|{CAST}")
        attrs = {"written": True} if written else {}
        return self.emit("cast", (x,), TensorType(x.shape, dtype), origin, **attrs)

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
        if step != 1:
            return NotImplemented
        dim %= len(x.shape)
        start = 0 if start is None else start
        if isinstance(start, int) and start < 0:
            start = as_dim(start + x.shape[dim])
        stop = as_dim(start + y.shape[dim])
        parts = [y]
        if start != 0:
            parts.insert(0, self.slice(x, dim, 0, start, origin))
        if stop != x.shape[dim]:
            parts.append(self.slice(x, dim, stop, x.shape[dim], origin))
        return self.op_cat(fx_node, origin, parts, dim)

    def op_select_scatter(self, fx_node: Any, origin: Origin, x: Node, y: Node, dim: int,
                          index: Any) -> Any:  # fmt: skip
        dim %= len(x.shape)
        index = as_dim(index + x.shape[dim]) if isinstance(index, int) and index < 0 else index
        row = self.reshape(y, (*x.shape[:dim], 1, *x.shape[dim + 1 :]), origin)
        return self.op_slice_scatter(fx_node, origin, x, row, dim, index)

    def op_copy(self, fx_node: Any, origin: Origin, x: Node, source: Node, *_: Any) -> Node:
        if source.dtype != x.dtype:
            type = TensorType(source.shape, x.dtype)
            source = self.emit("cast", (source,), type, origin, written=True)
        return self.op_expand(fx_node, origin, source)

    def _reduce(self, fx_node: Any, op: str, origin: Origin, x: Node, dims: Any) -> Any:
        type = self.type_of(fx_node)
        if x.dtype not in FUSABLE or type.dtype not in FUSABLE or x.dtype == torch.bool:
            return NotImplemented
        rank = len(x.shape)
        dims = [dims] if isinstance(dims, int) else dims
        where = tuple(sorted({d % rank for d in dims})) if dims else tuple(range(rank))
        if not where:
            return x
        if op != "sum" and not _is_row(x, where):
            return NotImplemented  # only sums are combined across rows
        kept = tuple(1 if i in where else s for i, s in enumerate(x.shape))
        out = self.emit(op, (x,), TensorType(kept, type.dtype), origin, dims=where)
        return self.reshape(out, type.shape, origin)

    def op_sum(self, fx_node: Any, origin: Origin, x: Node, dims: Any = None, keepdim: bool = False,
               dtype: Any = None) -> Any:  # fmt: skip
        return self._reduce(fx_node, "sum", origin, x, dims)

    def op_amax(self, fx_node: Any, origin: Origin, x: Node, dims: Any = None,
                keepdim: bool = False) -> Any:  # fmt: skip
        return self._reduce(fx_node, "amax", origin, x, dims)

    def op_amin(self, fx_node: Any, origin: Origin, x: Node, dims: Any = None,
                keepdim: bool = False) -> Any:  # fmt: skip
        return self._reduce(fx_node, "amin", origin, x, dims)

    def op_bmm(self, fx_node: Any, origin: Origin, a: Node, b: Node) -> Any:
        self._same_dtype(a, b, origin)
        return self.emit("matmul", (a, b), self.type_of(fx_node), origin)

    def _same_dtype(self, a: Node, b: Node, origin: Origin) -> None:
        if a.dtype != b.dtype:  # traced on meta tensors, where PyTorch does not look
            raise CaptureError(
                f"{origin}: the operands of a product have different dtypes, {a.dtype} and "
                f"{b.dtype}; PyTorch refuses that too. Cast one of them."
            )

    def op_mm(self, fx_node: Any, origin: Origin, a: Node, b: Node) -> Any:
        self._same_dtype(a, b, origin)
        type = self.type_of(fx_node)
        batched = TensorType((1, *type.shape), type.dtype)
        a, b = (self.reshape(v, (1, *v.shape), origin) for v in (a, b))
        return self.reshape(self.emit("matmul", (a, b), batched, origin), type.shape, origin)

    def _full(self, fx_node: Any, name: str, args: list[Any], kwargs: Any, origin: Origin) -> Any:
        type = self.type_of(fx_node)
        value = _FULLS[name]
        if value is None:
            value = kwargs.get("fill_value", args[0] if name == "scalar_tensor" else args[-1])
        if not isinstance(value, (int, float, bool)):
            return self._extern(fx_node, args, kwargs, origin)
        return self.emit("full", (), type, origin, value=value)

    def _extern(self, fx_node: Any, args: list[Any], kwargs: dict[str, Any], origin: Origin) -> Any:
        operands: list[Node] = []

        def strip(value: Any) -> Any:
            if isinstance(value, Node):
                operands.append(value)
                return Ref(len(operands) - 1)
            if isinstance(value, (list, tuple)):
                return [strip(v) for v in value]
            return value

        call_args, call_kwargs = strip(args), {k: strip(v) for k, v in kwargs.items()}
        value = fx_node.meta["val"]
        single = isinstance(value, torch.Tensor)
        type = self.type_of(fx_node) if single else TensorType((), torch.float32)
        target = str(fx_node.target)
        return self.emit("extern", operands, type, origin, target=target, call_args=call_args,
                         call_kwargs=call_kwargs, multiple=not single)  # fmt: skip

    def _constant(self, traced: torch.fx.GraphModule, fx_node: torch.fx.Node) -> Any:
        value = getattr(traced, str(fx_node.target))
        if value.device.type == "meta":
            raise CaptureError(f"tracing failed: the code makes a constant tensor.{FOREIGN_TENSOR}")
        origin = Origin(f"constant {fx_node.target}")
        type = TensorType(tuple(value.shape), value.dtype)
        if value.numel() == 1 and type.dtype in FUSABLE:
            return self.emit("full", (), type, origin, value=value.item())
        return self.emit("extern", (), type, origin, target="constant", call_args=[],
                         call_kwargs={}, multiple=False, value=value)  # fmt: skip


def _all_fusable(value: Any) -> bool:
    """Whether every tensor in `value`, a traced value or translated arguments, is of FUSABLE."""
    if isinstance(value, (torch.Tensor, Node)):
        return value.dtype in FUSABLE
    if isinstance(value, dict):
        value = list(value.values())
    return all(map(_all_fusable, value)) if isinstance(value, (list, tuple)) else True


def _is_row(x: Node, dims: tuple[int, ...]) -> bool:
    """Whether `dims` are the innermost extents of `x` other than 1, all known at compile time."""
    wide = [d for d, extent in enumerate(x.shape) if extent != 1]
    inner = [d for d in dims if d in wide]
    return inner == wide[len(wide) - len(inner) :] and all(
        isinstance(x.shape[d], int) for d in inner
    )
