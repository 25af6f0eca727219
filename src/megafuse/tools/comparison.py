"""Float64, eager and a candidate on one case, compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megafuse.subgraphs import Case
from megafuse.tools import accuracy
from megafuse.tools.repeats import unrepeatable
from megafuse.tools.steps import (
    Call,
    InFloat64,
    Results,
    Target,
    bind,
    converted,
    draw_grad_outputs,
    normal_like,
    run_step,
)

_GRAD_SEED = 1000


class Comparison:
    """Float64, eager and the candidate (twice) on one case."""

    def __init__(
        self, case: Case, candidate: Target, upstream: list[Tensor] | None, held: bool
    ) -> None:
        self.case = case
        self.sums: dict[str, accuracy.ErrorSums] = {}
        self.problems: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.findings: list[str] = []
        call = bind(case.module, case.args, case.kwargs)
        if upstream is None:
            upstream = draw_grad_outputs(case.module, call, _GRAD_SEED)
        self.upstream = upstream
        if not any(t.requires_grad for t in call.inputs.values()):
            self.findings.append("note: no input requires a gradient, so none was compared")
        self.exact = self._float64(upstream)
        self.eager = run_step(case.module, call, upstream)
        self.candidate = self._candidate(candidate, call, held)

    def _float64(self, upstream: Sequence[Tensor]) -> Results:
        wide = torch.float64
        module, args, kwargs = converted((self.case.module, self.case.args, self.case.kwargs), wide)
        with InFloat64():
            return run_step(module, bind(module, args, kwargs), [g.to(wide) for g in upstream])

    def _candidate(self, target: Target, call: Call, held: bool) -> Results:
        theirs = bind(target, call.args, call.kwargs).parameters
        mine = Call(call.args, call.kwargs, call.inputs, theirs)
        for name, parameter in call.parameters.items():
            if name not in theirs:
                self.findings.append(f"the candidate has no parameter {name}")
            elif not _same(theirs[name], parameter):
                self.findings.append(f"parameter {name} differs from the reference's")
        owned = {**call.inputs, **call.parameters}
        owned |= {f"upstream gradient {i}": g for i, g in enumerate(self.upstream)}
        before = {name: t.detach().clone() for name, t in owned.items()}
        first = run_step(target, mine, self.upstream)
        if held:
            self._hold(target, mine, first)
        second = run_step(target, mine, self.upstream)
        if differing := _differing(first, second):
            varying = self._varying_in_eager(call)
            for name in differing:
                if name in varying:
                    self.findings.append(f"note: {name} differs from run to run, {varying[name]}")
                else:
                    self._problem(name, "two runs differ")
        for name, copied in before.items():
            if not _same(owned[name], copied):
                self.findings.append(f"the candidate modified {name}, which the caller owns")
        return first

    def _varying_in_eager(self, call: Call) -> dict[str, str]:
        """Results that eager itself does not repeat, and how that shows: some of PyTorch's
        operators add in an order of their own (attention's and a table's backward), and they are
        the candidate's too.

        Either two runs of eager differ, or the result depends on such an operator. The second,
        because eager may repeat a tensor by chance: a bias gradient sums what varies, and its few
        rounded numbers can agree. What depends on no such operator has to repeat.
        """
        depends = unrepeatable(self.case.module, call, self.upstream)
        varying = dict.fromkeys(depends, "as what eager computes it from does")
        runs = [run_step(self.case.module, call, self.upstream) for _ in range(3)]
        seen = {name for run in runs for name in _differing(self.eager, run)}
        return varying | dict.fromkeys(seen, "as eager's does")

    def _hold(self, target: Target, call: Call, first: Results) -> None:
        """A later call on other values must leave the results of an earlier one alone."""
        copies = {n: t.clone() for n, t in first.named().items() if t is not None}
        args, kwargs = pytree.tree_map(_other, (call.args, call.kwargs))
        run_step(target, bind(target, args, kwargs), self.upstream)
        for name, copied in copies.items():
            if not _same(first.named()[name], copied):
                self._problem(name, "overwritten by a later call")

    def _problem(self, name: str, text: str) -> None:
        self.problems.setdefault(name, []).append(text)

    def measure(self, u: float) -> None:
        """Compare every tensor; release each as soon as its sums are known."""
        exact, eager, candidate = (r.named() for r in (self.exact, self.eager, self.candidate))
        suspects = []
        for name, ours in eager.items():
            theirs, true = candidate.pop(name, None), exact.pop(name, None)
            if ours is None:
                if theirs is not None and bool(theirs.count_nonzero()):
                    self.shapes[name] = tuple(theirs.shape)
                    self._problem(name, "has a value where eager has no gradient")
                continue
            self.shapes[name] = tuple(ours.shape)
            if theirs is None:
                self._problem(name, "missing")
            elif theirs.shape != ours.shape or theirs.dtype != ours.dtype:
                self._problem(name, f"is {_kind(theirs)}, eager's is {_kind(ours)}")
            elif not ours.is_floating_point():
                if not torch.equal(ours, theirs):
                    self._problem(name, "differs from eager's")
                self.sums[name] = accuracy.ErrorSums(0, 0, 0, 0, 0, 0, 0, 0)
            elif true is not None:
                entry = accuracy.measure(true, ours, theirs)
                self.sums[name] = entry
                if entry.eager_rms >= 0.5 * entry.reference_rms:
                    suspects.append(name)
        for name, extra in candidate.items():
            if extra is not None:
                self.findings.append(f"the candidate returned {name}, which eager does not")
        del exact, eager, candidate, self.exact, self.eager, self.candidate
        if suspects:
            self._rescale(suspects, u)

    def _rescale(self, names: Sequence[str], u: float) -> None:
        """Measure against the size of the terms that cancel where the true value is zero.

        That size is what the same tensor has under another upstream gradient (a LayerNorm followed
        by a plain sum has a zero gradient, a LayerNorm alone has not), and at least what eager's
        own rounding implies.
        """
        other = [
            n * g.double().square().mean().sqrt().to(n.dtype)
            for n, g in zip(normal_like(self.upstream, 7), self.upstream, strict=True)
        ]
        generic = self._float64(other).named()
        for name in names:
            entry, value = self.sums[name], generic[name]
            size = 0.0 if value is None else value.square().mean().sqrt().item()
            if name.startswith("output"):
                size = 0.0
            scale = max(size, 4 * entry.eager_rms / u)
            if scale > 0 and entry.reference_rms <= accuracy.ZERO_IN_THEORY * scale:
                self.sums[name] = entry.scaled(scale)


def _other(value: Any) -> Any:
    """Other values of the same kind; the sign changes too, since a norm undoes a mere factor."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return (value.detach() * -0.5).requires_grad_(value.requires_grad)
    return value


def _differing(first: Results, second: Results) -> list[str]:
    """Names of the tensors that two runs both have, with other values."""
    others = second.named()
    pairs = ((name, tensor, others.get(name)) for name, tensor in first.named().items())
    return [n for n, a, b in pairs if a is not None and b is not None and not _same(a, b)]


def _same(a: Tensor | None, b: Tensor) -> bool:
    """Equal values, a NaN being equal to a NaN."""
    if a is None or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _kind(tensor: Tensor) -> str:
    return f"{short(tensor.dtype)}{list(tensor.shape)}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
