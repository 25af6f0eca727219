"""Pointwise operators: one entry each with its aten names, meaning, C++ spelling and cost.

To add one, add an entry; `tests/ops/test_completeness.py` fails when a field or sample is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pointwise:
    """One operator on elements.

    aten: names of the aten overload packets it stands for (first tensor arguments in order).
    torch: Python source of its meaning on tensors or numbers; {0}, {1} ... are the arguments.
    cpp: C++ source over `mf::Vec` or float, in the words of `codegen/tile`.
    flops: floating-point operations an element, for the cost model.
    samples: one argument tuple each of numbers the operator is defined on, for tests.
    expensive: worth carrying from one phase of a row program to the next rather than recomputing.
    """

    name: str
    arity: int
    aten: tuple[str, ...]
    torch: str
    cpp: str
    flops: int = 1
    samples: tuple[tuple[float, ...], ...] = ((0.5,), (-1.25,), (2.0,))
    expensive: bool = False


def _unary(name: str, cpp: str | None = None, flops: int = 1, **kw: object) -> Pointwise:
    return Pointwise(
        name, 1, (name,), f"torch.{name}({{0}})", cpp or f"mf::{name}({{0}})", flops, **kw  # type: ignore[arg-type]
    )


_PAIRS = ((0.5, 2.0), (-1.25, 3.0), (2.0, 2.0))


def _binary(name: str, cpp: str, torch_name: str | None = None, **kw: object) -> Pointwise:
    return Pointwise(
        name, 2, (name,), f"torch.{torch_name or name}({{0}}, {{1}})", cpp, samples=_PAIRS, **kw  # type: ignore[arg-type]
    )


_POSITIVE = ((0.5,), (1.0,), (7.0,))
_UNIT = ((0.5,), (-0.25,), (0.75,))

TABLE: dict[str, Pointwise] = {
    op.name: op
    for op in (
        Pointwise("add", 2, ("add",), "({0} + {1})", "({0} + {1})", samples=_PAIRS),
        Pointwise("sub", 2, ("sub",), "({0} - {1})", "({0} - {1})", samples=_PAIRS),
        Pointwise("mul", 2, ("mul",), "({0} * {1})", "({0} * {1})", samples=_PAIRS),
        Pointwise("div", 2, ("div", "true_divide"), "({0} / {1})", "({0} / {1})", 4, _PAIRS),
        _unary("neg", "(-{0})"),
        _unary("abs"),
        _unary("reciprocal", "mf::rcp({0})", 4, samples=_POSITIVE),
        _unary("exp", flops=8, expensive=True),
        _unary("expm1", flops=10, expensive=True),
        _unary("log", flops=8, samples=_POSITIVE, expensive=True),
        _unary("log1p", flops=10, samples=_POSITIVE, expensive=True),
        _unary("sqrt", flops=4, samples=_POSITIVE),
        _unary("rsqrt", flops=4, samples=_POSITIVE),
        _unary("sigmoid", flops=10, expensive=True),
        _unary("tanh", flops=12, expensive=True),
        _unary("erf", flops=16, samples=_UNIT, expensive=True),
        _unary("sin", flops=12, expensive=True),
        _unary("cos", flops=12, expensive=True),
        _unary("floor"),
        _unary("ceil"),
        _unary("relu"),
        _unary("isnan", "({0} != {0})"),
        Pointwise(
            "pow", 2, ("pow",), "torch.pow({0}, {1})", "mf::pow({0}, {1})", 16,
            ((0.5, 2.0), (1.5, 3.0), (2.0, -0.5)), True,
        ),
        _binary("maximum", "mf::max({0}, {1})"),
        _binary("minimum", "mf::min({0}, {1})"),
        _binary("eq", "({0} == {1})"),
        _binary("ne", "({0} != {1})"),
        _binary("lt", "({0} < {1})"),
        _binary("le", "({0} <= {1})"),
        _binary("gt", "({0} > {1})"),
        _binary("ge", "({0} >= {1})"),
        _unary("logical_not", "mf::logical_not({0})", samples=((0.0,), (1.0,))),
        Pointwise(
            "logical_and", 2, ("logical_and",), "torch.logical_and({0}, {1})",
            "mf::logical_and({0}, {1})", samples=((0.0, 1.0), (1.0, 1.0)),
        ),
        Pointwise(
            "logical_or", 2, ("logical_or",), "torch.logical_or({0}, {1})",
            "mf::logical_or({0}, {1})", samples=((0.0, 1.0), (0.0, 0.0)),
        ),
        Pointwise(
            "where", 3, ("where",), "torch.where({0}, {1}, {2})", "mf::where({0}, {1}, {2})",
            samples=((1.0, 2.0, 3.0), (0.0, 2.0, 3.0)),
        ),
        # The one operator whose meaning is its result type; see ops.meaning and codegen.expr.
        Pointwise("cast", 1, ("_to_copy",), "{0}.to({dtype})", "{0}", flops=0),
    )
}

BY_ATEN: dict[str, Pointwise] = {name: op for op in TABLE.values() for name in op.aten}
