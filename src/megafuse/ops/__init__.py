"""What every graph operator means: its PyTorch spelling, which the printed graph runs with."""

from __future__ import annotations

import torch

from megafuse.ir import Node
from megafuse.ops import pointwise

VIEWS = frozenset({"reshape", "permute", "expand", "slice"})
REDUCTIONS = frozenset({"sum", "amax", "amin"})


def is_pointwise(node: Node) -> bool:
    return node.op in pointwise.TABLE or node.op == "full"


def is_view(node: Node) -> bool:
    return node.op in VIEWS


def is_reduction(node: Node) -> bool:
    return node.op in REDUCTIONS


def reduced_shape_keeps_dims(node: Node) -> tuple[int, ...]:
    """The dimensions a reduction node sums over; its own shape keeps them with extent 1."""
    return tuple(node.attrs["dims"])


def spell(node: Node, names: list[str]) -> str:
    """`node` as a runnable PyTorch expression; names are those of its arguments, and `device` is
    where the graph runs."""
    shape = "[" + ", ".join(map(str, node.shape)) + "]"
    match node.op:
        case "full":
            value = repr(node.attrs["value"])
            return f"torch.full({shape}, {value}, dtype={node.dtype}, device=device)"
        case "reshape":
            return f"{names[0]}.reshape({shape})"
        case "permute":
            return f"{names[0]}.permute({list(node.attrs['order'])})"
        case "expand":
            return f"{names[0]}.expand({shape})"
        case "slice":
            a = node.attrs
            where = f"{a['dim']}, {a['start']}, {a['stop']}, {a['step']}"
            return f"torch.ops.aten.slice({names[0]}, {where})"
        case "cat":
            return f"torch.cat([{', '.join(names)}], {node.attrs['dim']})"
        case "sum":
            dims = list(node.attrs["dims"])
            return f"torch.sum({names[0]}, {dims}, True, dtype={node.dtype})"
        case "amax" | "amin":
            return f"torch.{node.op}({names[0]}, {list(node.attrs['dims'])}, True)"
        case "matmul":
            left, right, *extras = names
            if not extras:
                return f"torch.bmm({left}, {right})"
            return " + ".join([f"torch.baddbmm({extras[0]}, {left}, {right})", *extras[1:]])
        case "item":
            return f"{names[0]}[{node.attrs['index']}].contiguous()"
        case "extern":
            return _spell_extern(node, names)
        case _:
            dtype = str(node.dtype)
            return pointwise.TABLE[node.op].torch.format(*names, dtype=dtype)


def _spell_extern(node: Node, names: list[str]) -> str:
    from megafuse.ir import Ref

    def show(value: object) -> str:
        if isinstance(value, Ref):
            return names[value.index]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(show, value)) + "]"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return "device"
        return repr(value) if not hasattr(value, "free_symbols") else str(value)

    target = node.attrs["target"]
    if target == "constant":
        value = node.attrs["value"]
        return f"torch.tensor({value.tolist()!r}, dtype={node.dtype}, device=device)"
    args = [show(a) for a in node.attrs["call_args"]]
    args += [f"{k}={show(v)}" for k, v in node.attrs["call_kwargs"].items()]
    whole = "" if node.attrs["multiple"] else ".contiguous()"
    return f"torch.ops.{target}({', '.join(args)}){whole}"
