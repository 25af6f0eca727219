"""Products to try, with their operands in every layout, and the float64 answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafuse.codegen.matmul import Step
from megafuse.runtime.product import Product, View

BIAS: tuple[Step, ...] = (Step("add", "row"),)
RESIDUAL: tuple[Step, ...] = (Step("add", "tensor"),)
BOTH: tuple[Step, ...] = (*BIAS, *RESIDUAL)
GATED: tuple[Step, ...] = (
    Step("mul", "row"), Step("add", "row"), Step("sigmoid"), Step("sub", 1.0, first=True),
    Step("mul", "tensor"),
)  # fmt: skip
EPILOGUES = {"plain": (), "bias": BIAS, "residual": RESIDUAL, "both": BOTH, "gated": GATED}


@dataclass
class Case:
    """One product with its data. c is full of NaN, and has room around it that must stay so."""

    product: Product
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    rows: list[torch.Tensor]
    tensor: torch.Tensor | None
    room: torch.Tensor

    def want(self) -> torch.Tensor:
        """The answer in float64, from the rounded operands."""
        value = self.a.double() @ self.b.double()
        rows = iter(self.rows)
        for step in self.product.epilogue:
            operand: torch.Tensor | float | None = None
            if step.operand == "row":
                row = next(rows).double()
                operand = row if row.dim() == 1 else row[:, None, :]
            elif step.operand == "tensor":
                assert self.tensor is not None
                operand = self.tensor.double()
            elif step.operand is not None:
                operand = float(step.operand)
            if step.op == "sigmoid":
                value = torch.sigmoid(value)
            else:
                function = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[step.op]
                pair = (torch.as_tensor(operand, dtype=value.dtype, device=value.device), value)
                value = function(*pair) if step.first else function(*reversed(pair))
        return value

    def mismatch(self) -> str | None:
        """What is wrong with c: where the bad elements are, and some of them; None if nothing."""
        want, got = self.want(), self.c.double()
        unit = 2.0**-8 if self.c.dtype == torch.bfloat16 else 2.0**-11
        scale = want.abs().max().clamp(min=1e-3)
        bad = ~((got - want).abs() <= 1.01 * unit * want.abs() + unit * 2**-4 * scale)
        outside = self.room.clone()
        outside[self._inside()] = float("nan")
        if not outside.isnan().all():
            return "memory around the result was written"
        if not bad.any():
            return None
        at = bad.nonzero()
        lines = [
            f"{len(at)} of {bad.numel()} elements wrong, {int(got.isnan().sum())} of them NaN",
            f"  batches {_ranges(at[:, 0])}; rows {_ranges(at[:, 1])}; columns {_ranges(at[:, 2])}",
        ]
        for place in at[:4].tolist():
            i = tuple(place)
            lines.append(f"  c{place} = {float(got[i]):.5g}, should be {float(want[i]):.5g}")
        return "\n".join(lines)

    def _inside(self) -> tuple[slice, ...]:
        return slice(None), slice(0, self.product.m), slice(0, self.product.whole_n)


def _ranges(values: torch.Tensor) -> str:
    """The distinct values as ranges: "0-15, 32-47"."""
    out: list[list[int]] = []
    for v in sorted(set(values.tolist())):
        if out and out[-1][1] == v - 1:
            out[-1][1] = v
        else:
            out.append([v, v])
    text = ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in out[:8])
    return text + (f" and {len(out) - 8} more ranges" if len(out) > 8 else "")


def make(
    batch: int,
    m: int,
    n: int,
    k: int,
    *,
    majors: str = "kn",
    epilogue: str = "plain",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    batch_inside: bool = False,
    shared_b: bool = False,
    row_dtype: torch.dtype | None = None,
    pitch: int = 0,
    seed: int = 0,
) -> Case:
    """majors: contiguous dimension of a ("k" or "m") and of b ("n" or "k"). batch_inside: a is a
    [m, batch, k] tensor seen as [batch, m, k] (and so is the tensor operand). shared_b: one b for
    all batches, and one row of each row operand. Rows start at multiples of 16 bytes, and
    another `pitch` elements apart; what is between them is NaN."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def width(extent: int) -> int:
        return -(-extent // 8) * 8 + pitch

    def data(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        *outer, last = shape
        room = torch.full((*outer, width(last)), float("nan"), dtype=dtype, device=device)
        room[..., :last] = torch.randn(*shape, generator=generator, device=device).to(dtype)
        return room[..., :last]

    a_k, b_n = majors[0] == "k", majors[1] == "n"
    if batch_inside and a_k:
        a = data(m, batch, k).transpose(0, 1)
    elif batch_inside:
        a = data(k, batch, m).permute(1, 2, 0)
    else:
        a = data(batch, m, k) if a_k else data(batch, k, m).transpose(1, 2)
    copies = 1 if shared_b else batch
    b = data(copies, k, n) if b_n else data(copies, n, k).transpose(1, 2)
    b = b.expand(batch, -1, -1)
    steps = EPILOGUES[epilogue]
    row_dtype = row_dtype or dtype
    rows = [
        data(n, dtype=row_dtype) if shared_b else data(batch, n, dtype=row_dtype)
        for s in steps if s.operand == "row"
    ]  # fmt: skip
    tensor = None
    if any(s.operand == "tensor" for s in steps):
        tensor = data(m, batch, n).transpose(0, 1) if batch_inside else data(batch, m, n)
    room = torch.full((batch, m + 2, width(n)), float("nan"), dtype=dtype, device=device)
    c = room[:, :m, :n]
    product = Product(
        View.of(a), View.of(b), View.of(c), steps, tuple(View.of(r) for r in rows),
        View.of(tensor) if tensor is not None else None,
    )  # fmt: skip
    return Case(product, a, b, c, rows, tensor, room)
