"""One pointwise operator as C++ over tile vectors or row scalars."""

from __future__ import annotations

import math

import sympy
import torch

from megafuse.ir import Node
from megafuse.ops import pointwise

CPP_TYPE = {
    torch.float32: "float",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "bool8",
}


def scalar_cpp(value: object) -> str:
    """A Python number or run-time size as a constant of the row program's arithmetic type."""
    if isinstance(value, sympy.Expr):
        names = {s: sympy.Symbol(f"mf::real(a.{s.name})") for s in value.free_symbols}
        return f"mf::real({sympy.ccode(value.xreplace(names))})"
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number):
        return "(mf::scalar::infinity() - mf::scalar::infinity())"
    if math.isinf(number):
        return "mf::scalar::infinity()" if number > 0 else "(-mf::scalar::infinity())"
    return f"mf::real({number!r})"


def pointwise_cpp(node: Node, args: list[str], rounding: bool, fast: bool = False) -> str:
    """`node` applied to `args`. rounding: round to the node's dtype as eager does. fast: a division
    by a constant may be a product with its reciprocal."""
    divisor = node.args[1] if node.op == "div" else None
    if fast and isinstance(divisor, (int, float)) and divisor:
        args = [args[0], scalar_cpp(1.0 / divisor)]
        text = f"({args[0]} * {args[1]})"
        return rounded(text, node.dtype) if rounding else text
    spelling = pointwise.TABLE[node.op].cpp
    text = _power(node, args) if node.op == "pow" else spelling.format(*args)
    if node.dtype == torch.bool and node.op == "cast":
        return f"({text} != mf::real(0))"
    return rounded(text, node.dtype) if rounding else text


def rounded(text: str, dtype: torch.dtype) -> str:
    word = {torch.bfloat16: "mf::to_bf16", torch.float16: "mf::to_f16"}.get(dtype)
    return f"{word}({text})" if word else text


def _power(node: Node, args: list[str]) -> str:
    """Small constant exponents as PyTorch computes them: by products and roots."""
    x = args[0]
    special = {2.0: f"({x} * {x})", 3.0: f"({x} * {x} * {x})", 1.0: x,
               0.5: f"mf::sqrt({x})", -0.5: f"mf::rsqrt({x})", -1.0: f"mf::rcp({x})"}  # fmt: skip
    exponent = node.args[1]
    if isinstance(exponent, (int, float)) and float(exponent) in special:
        return special[float(exponent)]
    return pointwise.TABLE["pow"].cpp.format(*args)
