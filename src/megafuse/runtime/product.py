"""Operands of a product on Hopper: which ones the kernel takes, and how they are addressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megafuse.codegen.matmul import ARCH, HALVES, Major, Step, Tail, refused_epilogue, refused_tail
from megafuse.fusion.plan import MatmulRegion, Operand
from megafuse.ir import evaluate


@dataclass(frozen=True)
class View:
    """A strided part of a buffer: shape, strides and offset from the buffer's start in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """`tensor` itself, its own first element being the buffer's start."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def of_operand(cls, operand: Operand, sizes: Mapping[str, int]) -> View:
        return cls(
            tuple(evaluate(d, sizes) for d in operand.shape),
            tuple(evaluate(d, sizes) for d in operand.strides),
            operand.buffer.dtype, evaluate(operand.offset, sizes),
        )  # fmt: skip

    @property
    def start(self) -> int:
        """Bytes from the buffer's start to the first element."""
        return self.offset * self.dtype.itemsize


@dataclass(frozen=True)
class Product:
    """c[b] = epilogue(a[b] @ b[b]).

    a: [batch, m, k]; b: [batch, k, n]; c: [batch, m, n]; rows: [batch, n] or [n] each, in the order
    the epilogue's steps take them; tensor: [batch, m, n]. tail: what follows the rounded result,
    with `ins` and `outs` of [batch, m, n]; c is then the first of `outs`.
    """

    a: View
    b: View
    c: View
    epilogue: tuple[Step, ...] = ()
    rows: tuple[View, ...] = ()
    tensor: View | None = None
    tail: Tail | None = None
    ins: tuple[View, ...] = ()
    outs: tuple[View, ...] = ()

    @property
    def batch(self) -> int:
        return self.c.shape[0]

    @property
    def m(self) -> int:
        return self.c.shape[1]

    @property
    def n(self) -> int:
        return self.c.shape[2]

    @property
    def k(self) -> int:
        return self.a.shape[2]

    @property
    def whole_n(self) -> int:
        """n, and what is left of the last 16 bytes of a row: columns that kernels compute too."""
        return -(-self.n // 8) * 8


def product_of(
    region: MatmulRegion, sizes: Mapping[str, int], body: tuple[str, ...] = ()
) -> Product:
    """A planned matmul at run-time sizes, its result freshly allocated. body: its tail's code,
    which nothing but the building of a kernel asks for."""
    batch, m, n = (evaluate(d, sizes) for d in region.node.shape)
    pitch = evaluate(region.node.room[-1], sizes)
    steps, rows, tensor = [], [], None
    for kind, operand in region.extras:
        view = View.of_operand(operand, sizes)
        if kind == "row":
            steps.append(Step("add", "row"))
            rows.append(replace(view, shape=(batch, n), strides=(view.strides[0], view.strides[2])))
        else:
            steps.append(Step("add", "tensor"))
            tensor = view
    result = View((batch, m, n), (m * pitch, pitch, 1), region.node.dtype)
    made = Product(View.of_operand(region.a, sizes), View.of_operand(region.b, sizes), result,
                   tuple(steps), tuple(rows), tensor)  # fmt: skip
    planned = region.tail
    if planned is None:
        return made
    tail = Tail(body, len(planned.ins), len(planned.outs), len(planned.sums))
    ins = tuple(View.of_operand(o, sizes) for _, o in planned.ins)
    outs = tuple(View.of_operand(o, sizes) for _, o in planned.outs)
    return replace(made, c=outs[0], tail=tail, ins=ins, outs=outs)


@dataclass(frozen=True)
class MapLayout:
    """A tensor map before it has an address: extents innermost first, strides in bytes of all but
    the innermost. step: 0 where all batches share the operand, whose map then has a single one."""

    dtype: torch.dtype
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    step: int


RESULT = "the result"
_MOST_EXTENT, _MOST_STRIDE, ALIGNMENT = 1 << 31, 1 << 40, 16


def map_layout(view: View, inner: int, name: str) -> MapLayout | str:
    """How the copy engine addresses `view` with dimension `inner` (1 or 2) contiguous; a sentence
    when it cannot. It reads an extent exactly, but stores whole pieces of 16 bytes: rows of a
    result that end inside one need the rest of it to themselves."""
    outer, size = 3 - inner, view.dtype.itemsize
    extents = view.shape[inner], view.shape[outer], view.shape[0]
    if extents[0] > 1 and view.strides[inner] != 1:
        return f"neither dimension of {name} is contiguous (strides {view.strides})"
    if view.start % ALIGNMENT:
        return f"{name} starts {view.start} bytes into its buffer, no multiple of 16"
    if max(extents) >= _MOST_EXTENT:
        return f"{name} has an extent of {max(extents)}, more than a tensor map can hold"
    dense = extents[0] * size
    whole = -(-dense // ALIGNMENT) * ALIGNMENT
    if name == RESULT and dense != whole and view.strides[outer] * size != whole:
        return f"the rows of {name} are {dense} bytes long, which is no multiple of 16"
    row = view.strides[outer] * size if extents[1] > 1 else whole
    shared = extents[2] == 1 or view.strides[0] == 0
    plane = row * extents[1] if shared else view.strides[0] * size
    for stride, what in ((row, "rows"), (plane, "batches")):
        if stride <= 0 or stride % ALIGNMENT or stride >= _MOST_STRIDE:
            return f"the {what} of {name} are {stride} bytes apart, which is no multiple of 16"
    batches = 1 if shared else extents[2]
    return MapLayout(view.dtype, (extents[0], extents[1], batches), (row, plane), int(not shared))


def _operand_layout(view: View, k_dim: int, name: str) -> tuple[Major, MapLayout] | str:
    """The operand with k contiguous if it can be read so, else with its other dimension."""
    reason = ""
    majors: tuple[tuple[Major, int], ...] = (("k", k_dim), ("mn", 3 - k_dim))
    for major, inner in majors:
        layout = map_layout(view, inner, name)
        if not isinstance(layout, str):
            return major, layout
        # The dimension that is contiguous has the more telling reason.
        if not reason or view.strides[inner] == 1:
            reason = layout
    return reason


def accepts(product: Product, arch: str = ARCH) -> str | None:
    """Why this product has to go another way, in a sentence; None when the kernel takes it.

    Pointers are judged at the launch: see `runtime.matmul.Matmul.aligned`.
    """
    return refused(product, arch) or _reason(layouts_of(product))


@dataclass(frozen=True)
class Layouts:
    """The majors of a and b, and how each operand is addressed."""

    a_major: Major
    b_major: Major
    a: MapLayout
    b: MapLayout
    c: MapLayout
    tensor: MapLayout | None
    ins: tuple[MapLayout, ...] = ()
    outs: tuple[MapLayout, ...] = ()


def refused(product: Product, arch: str) -> str | None:
    """Everything that is not about addressing."""
    a, b, c, tensor = product.a, product.b, product.c, product.tensor
    if arch != ARCH:
        return f"the kernel is written for {ARCH}, and this device is {arch}"
    if a.dtype not in HALVES or b.dtype != a.dtype:
        return f"the kernel multiplies bfloat16 or float16, not {a.dtype} by {b.dtype}"
    if c.dtype not in HALVES:
        return f"the kernel writes bfloat16 or float16, not {c.dtype}"
    batch, m, n, k = product.batch, product.m, product.n, product.k
    if a.shape != (batch, m, k) or b.shape != (batch, k, n):
        return f"the shapes {a.shape} @ {b.shape} -> {c.shape} are no batched product"
    if k == 0:
        return "a sum over no elements needs no tensor core"
    if (m > 1 and c.strides[1] < n) or (batch > 1 and c.strides[0] == 0):
        return f"elements of the result overlap (strides {c.strides})"
    if reason := refused_epilogue(product.epilogue):
        return reason
    rows = sum(s.operand == "row" for s in product.epilogue)
    if rows != len(product.rows) or any(s.operand == "tensor" for s in product.epilogue) != (
        tensor is not None
    ):
        return "the epilogue's steps and operands do not match"
    if len({r.dtype for r in product.rows}) > 1:
        return "the row operands of an epilogue must have one dtype"
    for row in product.rows:
        if reason := _refused_row(row, batch, n):
            return reason
    if tensor is not None and (tensor.dtype not in HALVES or tensor.shape != c.shape):
        return f"a tensor operand is bfloat16 or float16 in the result's shape, not {tensor}"
    return _refused_tail(product) if product.tail else None


def _refused_tail(product: Product) -> str | None:
    tail, c = product.tail, product.c
    assert tail is not None
    if (len(product.ins), len(product.outs)) != (tail.ins, tail.outs) or product.tensor:
        return "the tail's tensors do not match its code"
    for view in (*product.ins, *product.outs):
        if view.dtype != c.dtype or view.shape != c.shape:
            return f"the tail's tensors have the result's dtype and shape, not {view}"
    if tail.sums and product.n % 8:
        return "column sums of a tail are of whole pieces of 16 bytes"
    return refused_tail(tail)


def _refused_row(row: View, batch: int, n: int) -> str | None:
    if row.dtype not in (*HALVES, torch.float32):
        return f"a row operand is bfloat16, float16 or float32, not {row.dtype}"
    if row.shape not in ((n,), (batch, n), (1, n)):
        return f"a row operand has shape [{n}] or [{batch}, {n}], not {list(row.shape)}"
    if n > 1 and row.strides[-1] != 1:
        return "a row operand must be contiguous"
    if n % 8 and (len(row.shape) < 2 or row.strides[0] < -(-n // 8) * 8):
        return "a row operand that ends inside 16 bytes needs the rest of them to itself"
    if row.start % ALIGNMENT or row_stride(row) % ALIGNMENT:
        return "a row operand's rows must start at multiples of 16 bytes"
    return None


def row_stride(row: View) -> int:
    """Bytes from one batch to the next."""
    return row.strides[0] * row.dtype.itemsize if len(row.shape) == 2 and row.shape[0] > 1 else 0


def _reason(layouts: Layouts | str) -> str | None:
    return layouts if isinstance(layouts, str) else None


def layouts_of(product: Product) -> Layouts | str:
    """How the copy engine addresses the operands; a sentence when it cannot."""
    a = _operand_layout(product.a, 2, "the left operand")
    b = _operand_layout(product.b, 1, "the right operand")
    c = map_layout(product.c, 2, RESULT)
    tensor = map_layout(product.tensor, 2, "the tensor operand") if product.tensor else None
    ins = [map_layout(v, 2, "an operand of the tail") for v in product.ins]
    outs = [map_layout(v, 2, RESULT) for v in product.outs]
    for found in (a, b, c, tensor, *ins, *outs):
        if isinstance(found, str):
            return found
    return Layouts(a[0], b[0], a[1], b[1], c, tensor, tuple(ins), tuple(outs))  # type: ignore[arg-type]
