"""Products with tails, their tensors in odd places, and what is wrong with their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from products import Case, make

from megafuse.codegen.matmul import Tail
from megafuse.runtime.matmul import partials
from megafuse.runtime.product import Product, View

# Each keeps the product as its first result, so that the others can be judged bit by bit. Rows past
# the last one compute 0 / 0: a column sum that counts them is NaN.
TAILS = {
    "relu": Tail(("y[0] = x;", "y[1] = x > 0.f ? x : 0.f;"), 0, 2, 0),
    "gate": Tail(("y[0] = x;", "y[1] = x * t[0];", "s[0] = x / t[0];"), 1, 2, 1),
    "all": Tail(
        ("y[0] = x;", "y[1] = x * t[0];", "y[2] = x + t[1];", "s[0] = x;", "s[1] = t[2] / t[1];"),
        3, 3, 2,
    ),
}  # fmt: skip


@dataclass
class TailCase:
    """base: the product alone. outs: views of `rooms`, whose other elements stay NaN."""

    base: Case
    product: Product
    ins: list[torch.Tensor]
    outs: list[torch.Tensor]
    rooms: list[torch.Tensor]
    sums: torch.Tensor

    def clear(self) -> None:
        for room in (*self.rooms, self.sums):
            room.fill_(float("nan"))

    def mismatch(self) -> str | None:
        self.base.c, self.base.room = self.outs[0], self.rooms[0]
        if wrong := self.base.mismatch():
            return f"the product itself: {wrong}"
        x = self.outs[0].float()
        t = [i.float() for i in self.ins]
        wants: dict[int, list[torch.Tensor]] = {
            0: [torch.relu(x)], 1: [x * t[0]] if t else [],
            3: [x * t[0], x + t[1]] if len(t) > 1 else [],
        }  # fmt: skip
        for i, (want, got) in enumerate(zip(wants[len(t)], self.outs[1:], strict=True), 1):
            if not torch.equal(want.to(got.dtype), got):
                at = (want.to(got.dtype) != got).nonzero()
                return f"result {i}: {len(at)} elements wrong, the first at {at[0].tolist()}"
            outside = self.rooms[i].clone()
            outside[:, : got.shape[1], : got.shape[2]] = float("nan")
            if not outside.isnan().all():
                return f"memory around result {i} was written"
        summed = {0: [], 1: [x / t[0]] if t else [], 3: [x, t[2] / t[1]] if len(t) > 1 else []}
        for i, each in enumerate(summed[len(t)]):
            want = _blocks(each.double())
            error = (self.sums[i].double() - want).abs()
            if not (error <= 1e-5 * _blocks(each.double().abs()) + 1e-6).all():
                return f"column sum {i}: {error.max():.3g} off"
        return None


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Sums over 64 rows at a time."""
    return torch.stack([part.sum(1) for part in x.split(64, 1)], 1)


def make_tail(name: str, size: tuple[int, int, int, int], **how: Any) -> TailCase:
    """As `make`; operands and results have their rows further apart than they are long."""
    base = make(*size, **how)
    batch, m, n, _ = size
    tail, dtype, device = TAILS[name], base.c.dtype, base.c.device
    generator = torch.Generator(device).manual_seed(7)
    wide = -(-n // 8) * 8 + 16

    def room() -> torch.Tensor:
        return torch.full((batch, m + 1, wide), float("nan"), dtype=dtype, device=device)

    ins = []
    for _ in range(tail.ins):
        values = room()[:, :m, :n]
        x = torch.rand(batch, m, n, generator=generator, device=device) * 4 - 2
        values.copy_(x + torch.where(x < 0, -0.5, 0.5))  # never 0
        ins.append(values)
    rooms = [room() for _ in range(tail.outs)]
    outs = [r[:, :m, :n] for r in rooms]
    product = replace(
        base.product, c=View.of(outs[0]), tail=tail, ins=tuple(map(View.of, ins)),
        outs=tuple(map(View.of, outs)),
    )  # fmt: skip
    rows = partials(product) // max(batch, 1)
    sums = torch.full((tail.sums, batch, rows, n), float("nan"), device=device)
    return TailCase(base, product, ins, outs, rooms, sums)
