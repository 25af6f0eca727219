"""Random modules: hypothesis draws their statements, which are kept as runnable PyTorch source.

Every statement is run on tensors without data as it is drawn, so that shapes and dtypes are always
known and only legal code is made. Values are kept away from singularities (a logarithm is taken of
`x.abs() + 0.5`), and whatever jumps (comparisons, floor) is asked of inputs only, which are the
same in every precision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megafuse.ops.pointwise import TABLE

GUARDS = {
    "reciprocal": "({0}.abs() + 0.5)", "log": "({0}.abs() + 0.5)", "sqrt": "({0}.abs() + 0.5)",
    "rsqrt": "({0}.abs() + 0.5)", "log1p": "{0}.abs()", "exp": "torch.tanh({0})",
    "expm1": "torch.tanh({0})", "erf": "{0}", "sin": "{0}", "cos": "{0}",
}  # fmt: skip
"""What a unary operator is applied to, where not to any value."""

JUMPS = ("floor", "ceil", "isnan", "logical_not", "eq", "ne", "lt", "le", "gt", "ge",
         "logical_and", "logical_or")  # fmt: skip
UNARY = sorted(o.name for o in TABLE.values() if o.arity == 1 and o.name not in (*JUMPS, "cast"))
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "pow"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
ACTIVATIONS = ["silu", "gelu", "softplus", "leaky_relu", "elu", "hardswish", "mish", "logsigmoid"]
LAYOUTS = {
    "contiguous": "{0}",
    "transposed": "{0}.transpose(0, -1).contiguous().transpose(0, -1)",
    "sliced": "torch.cat([{0}, {0}], -1)[..., : {0}.shape[-1]]",
    "strided": "{0}.repeat_interleave(2, -1)[..., ::2]",
    "offset": "torch.cat([{0}.new_zeros(1), {0}.reshape(-1)])[1:].view({0}.shape)",
    "expanded": "{0}[:1].expand_as({0})",
}

HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn


"""
FOOTER = """

if __name__ == "__main__":
    import megafuse
    from megafuse import Options

    print(megafuse.check(Graph(), megafuse.fuse(Graph(), options={options}), *inputs()))
"""


@dataclass
class Program:
    """A module `Graph` with its `inputs()`; values: name → a tensor like it without data."""

    inputs: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    outputs: list[str] = field(default_factory=list)
    options: str = "Options()"

    def source(self) -> str:
        """Runnable PyTorch: the module, its inputs, and a check of one against the other."""
        names = [n for n in self.values if n.startswith("x")]
        made = "\n".join(f"    {line}" for line in self.inputs)
        own = "\n".join(f"        {line}" for line in self.parameters)
        body = "\n".join(f"        {line}" for line in self.lines)
        return (
            f"{HEADER}class Graph(nn.Module):\n    def __init__(self):\n"
            f"        super().__init__()\n        torch.manual_seed(0)\n{own}\n\n"
            f"    def forward(self, {', '.join(names)}):\n"
            f"{body}\n        return {', '.join(self.outputs)},\n\n\n"
            f"def inputs():\n    torch.manual_seed(1)\n{made}\n    return [{', '.join(names)}]\n"
            f"{FOOTER.format(options=self.options)}"
        )

    def add(self, expression: str, exact: bool = False) -> str | None:
        """Append a statement; None, and nothing appended, where PyTorch refuses it or the result
        is too large to be worth compiling."""
        names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **self.values}
        for name, value in self.values.items():
            names[name.removeprefix("self.")] = value
        try:
            value = eval(expression.replace("self.", ""), names)
        except (RuntimeError, IndexError, ValueError):
            return None
        if not isinstance(value, Tensor) or value.numel() == 0 or value.numel() > 4096:
            return None
        name = f"v{sum(n.startswith('v') for n in self.values)}"
        self.lines.append(f"{name} = {expression}")
        self.values[name] = value
        if exact:
            self.exact.add(name)
        return name


class _Drawer:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw, self.program = draw, Program()

    def pick(self, values: Any) -> Any:
        return self.draw(st.sampled_from(list(values)))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    # -- what there is to begin with

    def input(self, shape: list[int], dtype: str) -> None:
        p = self.program
        name = f"x{len([n for n in p.values if n.startswith('x')])}"
        layout = self.pick(LAYOUTS)
        if len(shape) < 2 and layout == "transposed":
            layout = "contiguous"
        grad = self.draw(st.booleans())
        text = ", ".join(map(str, shape))
        p.inputs.append(f"{name} = torch.randn({text}).to({dtype})")
        if layout != "contiguous":
            p.inputs.append(f"{name} = {LAYOUTS[layout].format(name)}")
        if grad:
            p.inputs.append(f"{name}.requires_grad_()")
        p.values[name] = _without_data(shape, dtype).requires_grad_(grad)
        p.exact.add(name)

    def parameter(self, shape: list[int], dtype: str) -> str:
        p = self.program
        name = f"self.w{len(p.parameters)}"
        text = ", ".join(map(str, shape))
        p.parameters.append(f"{name} = nn.Parameter(torch.randn({text}).to({dtype}))")
        p.values[name] = _without_data(shape, dtype).requires_grad_()
        return name

    # -- statements

    def floating(self, exact: bool = False) -> str | None:
        """A floating-point value, later ones more often; none of parameters."""
        p = self.program
        names = [n for n, v in p.values.items() if v.is_floating_point()
                 and not n.startswith("self.") and (not exact or n in p.exact)]  # fmt: skip
        return names[-1 - min(self.number(0, 3), len(names) - 1)] if names else None

    def partner(self, name: str) -> str:
        """Something `name` may be combined with: a value, a parameter of its last extents, a
        number."""
        value = self.program.values[name]
        kind = self.pick(["value", "parameter", "number"])
        if kind == "number":
            return str(self.pick([2.0, -0.5, 3, 0.1]))
        if kind == "parameter" and value.dim():
            shape = list(value.shape[-self.number(1, min(2, value.dim())) :])
            return self.parameter([s if self.draw(st.booleans()) else 1 for s in shape],
                                  str(value.dtype))  # fmt: skip
        fitting = [n for n, v in self.program.values.items() if v.is_floating_point()
                   and not n.startswith("self.") and _broadcast(v.shape, value.shape)]  # fmt: skip
        return str(self.pick(fitting))

    def statement(self) -> str | None:
        x = self.floating()
        if x is None:
            return None
        make = self.pick([self.unary, self.unary, self.binary, self.binary, self.activation,
                          self.where, self.reduce, self.reduce, self.row, self.view, self.view,
                          self.view, self.join, self.product, self.cast, self.jump])  # fmt: skip
        return make(x)  # type: ignore[no-any-return]

    def unary(self, x: str) -> str | None:
        op = self.pick(UNARY)
        return self.program.add(TABLE[op].torch.format(GUARDS.get(op, "{0}").format(x)))

    def binary(self, x: str) -> str | None:
        op, y = self.pick(BINARY), self.partner(x)
        if op == "pow":
            return self.program.add(f"({x}.abs() + 0.5) ** {self.pick([2, 3, 0.5, -1, 1.5])}")
        if y[0] in "-0123456789":
            if op in ("maximum", "minimum"):
                return self.program.add(f"{x}.clamp({'min' if op == 'maximum' else 'max'}={y})")
            return self.program.add(TABLE[op].torch.format(x, y))
        y = f"({y}.abs() + 0.5)" if op == "div" else y
        return self.program.add(TABLE[op].torch.format(*self.pick([(x, y), (y, x)])
                                                       if op != "div" else (x, y)))  # fmt: skip

    def activation(self, x: str) -> str | None:
        return self.program.add(f"F.{self.pick(ACTIVATIONS)}({x})")

    def where(self, x: str) -> str | None:
        asked = self.floating(exact=True)
        if asked is None or not _broadcast(
            self.program.values[asked].shape, self.program.values[x].shape
        ):
            return None
        test = TABLE[self.pick(COMPARISONS)].torch.format(asked, self.pick([0.25, 0.0, -1]))
        if self.draw(st.booleans()):
            return self.program.add(f"{x}.masked_fill({test}, {self.pick([0.0, -2.5])})")
        return self.program.add(f"torch.where({test}, {x}, {self.partner(x)})")

    def dims(self, x: str) -> list[int]:
        rank = self.program.values[x].dim()
        return sorted(self.draw(st.sets(st.integers(0, rank - 1), min_size=1))) if rank else []

    def reduce(self, x: str) -> str | None:
        op = self.pick(["sum", "mean", "var", "amax", "amin", "logsumexp"])
        dims, keep = self.dims(x), self.draw(st.booleans())
        if not dims:
            return None
        extra = ", correction=0" if op == "var" else ""
        return self.program.add(f"{x}.{op}({dims}, keepdim={keep}{extra})")

    def row(self, x: str) -> str | None:
        shape = self.program.values[x].shape
        if not shape:
            return None
        op = self.pick(["softmax", "log_softmax", "layer_norm", "rms_norm"])
        if op == "layer_norm":
            w = self.parameter([shape[-1]], str(self.program.values[x].dtype))
            return self.program.add(f"F.layer_norm({x}, ({shape[-1]},), {w}, None, 0.1)")
        if op == "rms_norm":
            return self.program.add(f"{x} * torch.rsqrt({x}.square().mean(-1, True) + 0.1)")
        return self.program.add(f"{x}.{op}({self.number(0, len(shape) - 1)})")

    def view(self, x: str) -> str | None:
        shape = list(self.program.values[x].shape)
        exact = x in self.program.exact
        kind = self.pick(["reshape", "permute", "slice", "select", "unsqueeze", "expand", "split",
                          "flatten"])  # fmt: skip
        if not shape:
            kind = "expand"
        if kind == "reshape":
            order = self.draw(st.permutations([s for s in shape for s in _factors(s)] or [1]))
            cut = self.number(1, len(order))
            rest = 1
            for s in order[cut:]:
                rest *= s
            return self.program.add(f"{x}.reshape({[*order[:cut], rest]})", exact)
        if kind == "permute":
            order = self.draw(st.permutations(range(len(shape))))
            return self.program.add(f"{x}.permute({list(order)})", exact)
        if kind == "flatten":
            return self.program.add(f"{x}.flatten({self.number(0, len(shape) - 1)})", exact)
        if kind == "unsqueeze":
            return self.program.add(f"{x}.unsqueeze({self.number(0, len(shape))})", exact)
        if kind == "expand":
            return self.program.add(f"{x}.expand({[self.number(2, 3), *shape]})", exact)
        d = self.number(0, len(shape) - 1)
        if kind == "select":
            return self.program.add(f"{x}.select({d}, {self.number(-1, shape[d] - 1)})", exact)
        if kind == "split" and shape[d] > 1:
            half = f"{x}.split({(shape[d] + 1) // 2}, {d})"
            return self.program.add(f"{half}[{self.number(0, 1)}]", exact)
        start = self.number(0, shape[d] - 1)
        stop, step = self.number(start + 1, shape[d]), self.number(1, 2)
        index = ", ".join([":"] * d + [f"{start}:{stop}:{step}"])
        return self.program.add(f"{x}[{index}]", exact)

    def join(self, x: str) -> str | None:
        value = self.program.values[x]
        same = [n for n, v in self.program.values.items()
                if v.shape == value.shape and v.dtype == value.dtype]  # fmt: skip
        parts = ", ".join([x, self.pick(same)])
        if value.dim() and self.draw(st.booleans()):
            return self.program.add(f"torch.cat([{parts}], {self.number(0, value.dim() - 1)})")
        return self.program.add(f"torch.stack([{parts}], {self.number(0, value.dim())})")

    def product(self, x: str) -> str | None:
        value = self.program.values[x]
        if not value.dim():
            return None
        scale = 1 / value.shape[-1] ** 0.5
        if value.dim() > 1 and self.draw(st.booleans()):
            return self.program.add(f"{x} @ {x}.transpose(-1, -2) * {scale:.3f}")
        w = self.parameter([value.shape[-1], self.number(1, 7)], str(value.dtype))
        if self.draw(st.booleans()):
            return self.program.add(f"F.linear({x}, {w}.t()) * {scale:.3f}")
        return self.program.add(f"{x} @ {w} * {scale:.3f}")

    def cast(self, x: str) -> str | None:
        return self.program.add(f"{x}.to({self.pick(['torch.float32', 'torch.bfloat16'])})")

    def jump(self, x: str) -> str | None:
        asked = self.floating(exact=True)
        if asked is None:
            return None
        if self.draw(st.booleans()):
            return self.program.add(f"torch.{self.pick(['floor', 'ceil'])}({asked})", True)
        tests = [TABLE[self.pick(COMPARISONS)].torch.format(asked, self.pick([0.5, -0.5]))
                 for _ in range(2)]  # fmt: skip
        both = TABLE[self.pick(["logical_and", "logical_or"])].torch.format(*tests)
        return self.program.add(f"{self.pick([both, f'torch.logical_not({tests[0]})'])}.float()")


def _without_data(shape: list[int], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")


def _factors(n: int) -> list[int]:
    for k in (2, 3, 5, 7):
        if n % k == 0 and n != k:
            return [k, *_factors(n // k)]
    return [n]


def _broadcast(a: Any, b: Any) -> bool:
    try:
        torch.broadcast_shapes(a, b)
    except RuntimeError:
        return False
    return True


@st.composite
def programs(draw: Any) -> Program:
    """Modules of up to ten statements over one to three inputs that share their batch. What no
    statement uses is returned, and some value besides."""
    drawer = _Drawer(draw)
    dtype = drawer.pick(["torch.float32", "torch.float32", "torch.bfloat16", "torch.float16"])
    batch = drawer.pick([3, 2, 5, 1])
    sizes = st.lists(st.sampled_from([4, 6, 1, 3, 7, 8, 33]), min_size=0, max_size=3).filter(
        lambda s: math.prod(s) <= 400
    )
    rest = draw(sizes)
    drawer.input([batch, *rest], dtype)
    for _ in range(drawer.number(0, 2)):
        drawer.input([batch, *(rest if draw(st.booleans()) else draw(sizes))], dtype)
    for _ in range(drawer.number(1, 10)):
        drawer.statement()
    program = drawer.program
    made = [n for n in program.values if n.startswith("v")]
    if not made:
        program.add("torch.tanh(x0)")
        made = ["v0"]
    used = " ".join(line.split(" = ", 1)[1] for line in program.lines)
    sinks = [n for n in made if not re.search(rf"\b{n}\b", used)]
    program.outputs = list(dict.fromkeys([*sinks[-4:], drawer.pick(made)]))
    program.options = drawer.pick(["Options(debug=True)", "Options()", "Options(memory='min')"])
    return program
