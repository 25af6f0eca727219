"""A traced aten graph, translated into the small vocabulary of `megafuse.ir`.

Views become reshape / permute / expand / slice, reductions keep their dimensions, matrix products
become one batched `matmul`, copies vanish, and everything unknown is kept whole as an `extern`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megafuse.building import BACKWARD as BACKWARD
from megafuse.building import Builder
from megafuse.errors import CaptureError
from megafuse.ir import (
    FUSABLE,
    Graph,
    Node,
    Origin,
    Ref,
    TensorType,
)
from megafuse.ops import pointwise

FOREIGN_TENSOR = (
    " A tensor that is neither a parameter, a buffer nor an argument takes part: register it as a "
    "buffer, or pass it (or the module that holds it) as an argument."
)

CAST = "@cast"
"""Ends the tag of casts the user wrote: they round in registers too."""

_SAME = {"clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "_reshape_alias"}
_FULLS = {"full": None, "zeros": 0, "ones": 1, "full_like": None, "zeros_like": 0, "ones_like": 1,
          "scalar_tensor": None, "new_zeros": 0, "new_ones": 1, "new_full": None,
          "empty": 0, "empty_like": 0, "new_empty": 0, "empty_strided": 0,
          "new_empty_strided": 0}  # fmt: skip


class Importer(Builder):
    """Translates one traced graph."""

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
            if name in _RESHAPES and args[0].dtype == self.type_of(fx_node).dtype:
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

    def op_bitwise_and(self, fx_node: Any, origin: Origin, *args: Any) -> Any:
        return self._on_booleans(fx_node, origin, "logical_and", args)

    def op_bitwise_or(self, fx_node: Any, origin: Origin, *args: Any) -> Any:
        return self._on_booleans(fx_node, origin, "logical_or", args)

    def op_bitwise_not(self, fx_node: Any, origin: Origin, *args: Any) -> Any:
        return self._on_booleans(fx_node, origin, "logical_not", args)

    def _on_booleans(self, fx_node: Any, origin: Origin, op: str, args: Sequence[Any]) -> Any:
        if self.type_of(fx_node).dtype != torch.bool:
            return NotImplemented
        return self._pointwise(fx_node, op, list(args), {}, origin)

    def op_copy(self, fx_node: Any, origin: Origin, x: Node, y: Node, *_: Any) -> Any:
        """The functional form of writing y over x."""
        if y.dtype != x.dtype:
            type = TensorType(y.shape, x.dtype)
            y = self.emit("cast", (y,), type, origin, written=True)
        return self.op_expand(fx_node, origin, y)

    def op_fill(self, fx_node: Any, origin: Origin, x: Node, value: Any) -> Any:
        if isinstance(value, Node):
            return self.op_expand(fx_node, origin, value)
        return self._full(fx_node, "full", [value], {}, origin)

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

    def op_addmm(self, fx_node: Any, origin: Origin, bias: Node, a: Node, b: Node,
                 **scales: Any) -> Any:  # fmt: skip
        return self._biased(fx_node, origin, bias, a, b, scales, self.op_mm)

    def op_baddbmm(self, fx_node: Any, origin: Origin, bias: Node, a: Node, b: Node,
                   **scales: Any) -> Any:  # fmt: skip
        return self._biased(fx_node, origin, bias, a, b, scales, self.op_bmm)

    def _biased(self, fx_node: Any, origin: Origin, bias: Node, a: Node, b: Node,
                scales: dict[str, Any], product: Callable[..., Node]) -> Any:  # fmt: skip
        """bias + a @ b; scaled forms (rare) stay whole. The sum is marked: PyTorch makes it before
        it rounds the product (see `passes.whole`)."""
        self._same_dtype(a, b, origin)
        self._same_dtype(bias, a, origin)
        if any(s != 1 for s in scales.values()):
            return NotImplemented
        total = product(fx_node, origin, a, b)
        return self.emit("add", (total, bias), self.type_of(fx_node), origin, bias=True)

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
