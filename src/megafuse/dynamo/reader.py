"""Reads an aten graph of AOTAutograd into `megafuse.ir`, operator by operator.

What generated code can compute becomes IR nodes; every other operator stays a PyTorch call, and its
results enter the IR as inputs. Nothing is refused: the reader only says what is which.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from megafuse.exported import place
from megafuse.importer import Importer
from megafuse.ir import FUSABLE, Dim, Node, Origin, as_dim, evaluate, product, symbol

Kind = Literal["source", "size", "view", "fused", "left"]
"""source: an input or constant of the graph. size: arithmetic on run-time sizes. view: renames
elements, so it is free on either side. fused: generated code. left: a PyTorch call."""

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float)
_WRITES = "writes in place"
_UNREADABLE = object()
"""The value of a tensor or size that needs a run-time size no graph input shows."""


class LeftToPyTorch(Exception):
    """An operator (or a group of them) that generated code does not compute, and why."""


class Reader(Importer):
    """One pass over `traced`, a functional aten graph with fake tensors in `meta["val"]`.

    kinds: what each FX node is. left: why a node is left to PyTorch. values: the IR value of each
    FX node. sizes: run-time size -> the placeholder (and dimension, None for a SymInt) it is read
    from. derived: further sizes, as expressions of those. hints: the value of each while tracing,
    at least 2.
    """

    def __init__(self, traced: fx.GraphModule, direction: Literal["forward", "backward"]) -> None:
        """Raises LeftToPyTorch for a graph that is not functional."""
        super().__init__(_shape_env(traced), {})
        self.traced, self.direction = traced, direction
        self.kinds: dict[fx.Node, Kind] = {}
        self.left: dict[fx.Node, str] = {}
        self.sizes: dict[str, tuple[fx.Node, int | None]] = {}
        self.derived: dict[str, sympy.Expr] = {}
        self.hints: dict[str, int] = {}
        self._compound: list[tuple[sympy.Expr, sympy.Symbol]] = []
        self._find_sizes()
        for node in traced.graph.nodes:
            self._read(node)
        written = [n for n, reason in self.left.items() if reason == _WRITES]
        if written:  # calls are moved, and what they read must not change meanwhile
            raise LeftToPyTorch(f"{written[0].target} {_WRITES}")

    def value(self, node: fx.Node) -> Any:
        """The fake value of `node`, or the constant it names."""
        if node.op == "get_attr" and "val" not in node.meta:
            return operator.attrgetter(str(node.target))(self.traced)
        return node.meta.get("val")

    # -- run-time sizes

    def _find_sizes(self) -> None:
        """Where each size is read. A size that only ever shows inside an expression, such as B * T
        of a flattened batch, is not known by itself: there the whole expression is the size."""
        shown: list[tuple[sympy.Expr, fx.Node, int | None, torch.SymInt]] = []
        for node in self.traced.graph.find_nodes(op="placeholder"):
            value = self.value(node)
            extents = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
            for dim, extent in extents:
                if isinstance(extent, torch.SymInt) and extent.node.hint is not None:
                    shown.append((self.env.simplify(extent.node.expr), node, dim, extent))
        shown.sort(key=lambda s: not s[0].is_Symbol)  # single sizes first
        for expr, node, dim, extent in shown:
            if all(s in self.names for s in expr.free_symbols):
                continue
            new = symbol(f"s{len(self.sizes)}")
            if expr.is_Symbol:
                self.names[expr] = new
            else:
                self._compound.append((expr, new))
            self.sizes[new.name] = node, dim
            self.hints[new.name] = max(2, int(extent.node.hint))

    def _known(self, value: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        """The expression of `value` in terms of sizes that can be read."""
        expr = self.env.simplify(value.node.expr)
        if not all(s in self.names for s in expr.free_symbols):
            for whole, new in self._compound:
                expr = expr.subs(whole, new)
        if not all(s in self.names or s.name in self.sizes for s in expr.free_symbols):
            raise LeftToPyTorch(f"the size {expr} cannot be read off the graph's inputs")
        return expr

    def dim(self, value: Any) -> Dim:
        if not isinstance(value, torch.SymInt):
            return as_dim(value)
        return as_dim(self._plain(self._known(value).xreplace(self.names)))

    def _plain(self, expr: sympy.Expr) -> sympy.Expr:
        """`expr` with every part that is no sum, product or power, such as B // 2, named as a size
        of its own: generated code knows polynomials."""
        if expr.is_Symbol or expr.is_number:
            return expr
        if expr.is_Add or expr.is_Mul or expr.is_Pow:
            return expr.func(*map(self._plain, expr.args))
        new = f"s{len(self.sizes) + len(self.derived)}"
        name = next((k for k, v in self.derived.items() if v == expr), new)
        self.derived[name] = expr
        self.hints[name] = max(2, evaluate(expr, self.hints))
        return symbol(name)

    def number(self, value: Any) -> Any:
        if isinstance(value, torch.SymFloat) and self._known(value).free_symbols - set(self.names):
            raise LeftToPyTorch("a number computed from a size that is not known by itself")
        number = super().number(value)
        return self._plain(number) if isinstance(number, sympy.Expr) else number

    # -- nodes

    def _read(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        value = self.value(node)
        if node.op != "call_function":
            self.kinds[node] = "size" if isinstance(value, _SIZES) else "source"
            self.values[node] = self._outside(node)
            return
        if isinstance(value, _SIZES):
            self.kinds[node] = "size"
            self.values[node] = self._outside(node)
            return
        before = len(self.nodes)
        try:
            self._check(node)
            self.values[node] = self._translate(node)
            self.kinds[node] = "view" if is_view(node) else "fused"
        except LeftToPyTorch as reason:
            del self.nodes[before:]
            self.kinds[node] = "left"
            self.left[node] = str(reason)
            self.values[node] = self._outside(node)

    def _outside(self, node: fx.Node) -> Any:
        """The IR value of what PyTorch computes: an input for a tensor, an expression of sizes."""
        value = self.value(node)
        try:
            if isinstance(value, torch.Tensor):
                made = Node(
                    node.name, "input", (), self.type_of(node, value), {}, self.origin(node)
                )
                self.nodes.append(made)
                return made
            if isinstance(value, torch.SymInt):
                return self.dim(value)
            return self.number(value) if isinstance(value, _SIZES) else _UNREADABLE
        except LeftToPyTorch:
            return _UNREADABLE

    def _check(self, node: fx.Node) -> None:
        """Raise LeftToPyTorch for what the importer does not look at."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if self.kinds[source] != "view":
                raise LeftToPyTorch(self.left.get(source, "one result of several"))
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise LeftToPyTorch("no aten operator")
        if node.target._schema.is_mutable:
            raise LeftToPyTorch(_WRITES)
        made = [v for v in tree_leaves(self.value(node)) if v is not None]
        used = [n for n in node.all_input_nodes if isinstance(self.value(n), torch.Tensor)]
        tensors = [*made, *map(self.value, used)]
        if not made or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise LeftToPyTorch("returns something else than tensors")
        for tensor in tensors:
            if tensor.dtype not in FUSABLE:
                raise LeftToPyTorch(f"works on {str(tensor.dtype).removeprefix('torch.')}")
            if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
                raise LeftToPyTorch(f"works on {tensor.layout} on {tensor.device}")
            if tensor.device != made[0].device:
                raise LeftToPyTorch("works on tensors of several devices")
            if any(isinstance(s, int) and s == 0 for s in tensor.shape):
                raise LeftToPyTorch("works on an empty tensor")
        if is_view(node) and used and made[0].dtype != self.value(used[0]).dtype:
            raise LeftToPyTorch("reads the same bytes as another dtype")

    def _arg(self, value: Any) -> Any:
        result = super()._arg(value)
        if result is _UNREADABLE:
            raise LeftToPyTorch("has an operand that generated code cannot describe")
        return result

    def _extern(self, fx_node: fx.Node, args: list[Any], kwargs: Any, origin: Origin) -> Any:
        raise LeftToPyTorch("no generated code for it")

    def reshape(self, x: Node, shape: Sequence[Dim], origin: Origin) -> Node:
        if as_dim(product(shape) - product(x.shape)) != 0:
            raise LeftToPyTorch(f"{x.shape} and {tuple(shape)} are not equally many for all sizes")
        return super().reshape(x, shape, origin)

    def op__to_copy(self, fx_node: Any, origin: Origin, x: Node, **kwargs: Any) -> Any:
        # Its device is the operand's (`_check`). A cast that PyTorch did not insert while opening
        # another operator is one that eager makes too: it rounds in registers as well.
        kwargs.pop("device", None)
        cast = super().op__to_copy(fx_node, origin, x, **kwargs)
        opened = fx_node.meta.get("original_aten")
        if cast.op == "cast" and (opened is None or "_to_copy" in str(opened)):
            cast.attrs["written"] = True
        return cast

    def origin(self, fx_node: fx.Node) -> Origin:
        meta = fx_node.meta
        op = str(fx_node.target).rsplit(".", 1)[0].removeprefix("torch.ops.")
        modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        path = _module_path(next(reversed(modules.values()))[0]) if modules else None
        return Origin(op, place(fx_node) or None, path or None, self.direction)


def is_view(node: fx.Node) -> bool:
    """Whether `node` returns other names for its operand's elements."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in node.target._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(a.is_write for a in aliases)


def is_ordered(node: fx.Node) -> bool:
    """Whether `node` must stay in its place among others of its kind: it draws random numbers,
    writes, or does something that its results do not show."""
    target = node.target
    if target is operator.getitem:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return seeded or target._schema.is_mutable or node.meta.get("val") is None


def _shape_env(traced: fx.GraphModule) -> ShapeEnv:
    for node in traced.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            extents: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else [value]
            for extent in extents:
                if isinstance(extent, torch.SymInt):
                    return extent.node.shape_env  # type: ignore[no-any-return]
    return ShapeEnv()


def _module_path(path: str) -> str:
    """Dynamo's path of a module, as `named_modules` spells it: L['self'].a[0] -> a.0."""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"(?:_modules)?\['?(\w+)'?\]", r".\1", path).replace("..", ".")
    return path.strip(".")
