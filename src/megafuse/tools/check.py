"""Is a fused module as good as eager? Outputs and every gradient against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafuse.errors import InputError
from megafuse.subgraphs import Case
from megafuse.tools import accuracy
from megafuse.tools.check_report import CheckReport, CheckStage
from megafuse.tools.comparison import Comparison, short
from megafuse.tools.steps import Target, converted, tf32

Progress = Callable[[str, int, int], None]


def check(
    reference: Target,
    fused: Target,
    *inputs: Any,
    grad_output: Tensor | Sequence[Tensor] | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Compare `fused` with the unfused `reference` on one set of inputs.

    Both are called with `inputs` and `kwargs`; floating-point inputs that require grad get their
    gradient checked, as do all parameters. `grad_output` is the upstream gradient, of the output's
    shape and dtype (a sequence where there are several outputs); None draws one. A bfloat16 or
    float16 check is followed by the same check on float32 copies of both, where a wrong epsilon or
    a lost row cannot hide behind rounding. Nothing passed in is modified.

    Raises InputError for inputs that are not of one supported precision.
    """
    report_to = progress or _silent
    case = Case(_as_module(reference), tuple(inputs), kwargs)
    upstream = None if grad_output is None else _as_list(grad_output)
    dtype = case_dtype(case)
    report_to(f"checking {short(dtype)}", 0, 2)
    stages = [check_stage([lambda: (case, fused, upstream)], dtype)]
    if dtype != torch.float32:
        report_to("checking float32", 1, 2)

        def in_float32() -> tuple[Case, Target, list[Tensor] | None]:
            single = torch.float32
            args, kw = converted((case.args, case.kwargs), single)
            plain = Case(converted(case.module, single), args, kw)
            lifted = None if upstream is None else [g.to(single) for g in upstream]
            return plain, _refused(fused, plain), lifted

        with tf32(False):
            stages.append(check_stage([in_float32], torch.float32))
    report_to("checked", 2, 2)
    return CheckReport(tuple(stages))


def check_cases(
    make: Callable[[int, torch.dtype | None], tuple[Case, Target]],
    seeds: Sequence[int],
    *,
    progress: Progress | None = None,
    float32: bool = True,
) -> CheckReport:
    """Check a candidate over several seeds, pooled, then over the same seeds in float32.

    `make(seed, dtype)` returns a freshly seeded case and its candidate; dtype None is the case's
    own precision. `float32=False` leaves the second part out.
    """
    report_to = progress or _silent
    stages: list[CheckStage] = []
    dtype: torch.dtype | None = None
    total = len(seeds)
    while True:
        runs = []
        for index, seed in enumerate(seeds):

            def run(index: int = index, seed: int = seed, to: torch.dtype | None = dtype) -> Any:
                report_to(f"checking {short(to) if to else 'as given'}, seed {seed}", index, total)
                case, candidate = make(seed, to)
                return case, candidate, None if case.grad_output is None else [case.grad_output]

            runs.append(run)
        with tf32(torch.backends.cuda.matmul.allow_tf32 and dtype is None):
            stage = check_stage(runs, dtype)
        stages.append(stage)
        report_to(f"checked {short(stage.dtype)}", total, total)
        if not float32 or stage.dtype == torch.float32:
            return CheckReport(tuple(stages))
        dtype = torch.float32


def check_stage(
    runs: Sequence[Callable[[], tuple[Case, Target, list[Tensor] | None]]],
    dtype: torch.dtype | None,
) -> CheckStage:
    """Compare one candidate a run, all in one precision, and judge each tensor over all runs."""
    sums: dict[str, list[accuracy.ErrorSums]] = {}
    problems: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    findings: list[str] = []
    for index, run in enumerate(runs):
        case, candidate, upstream = run()
        dtype = dtype or case_dtype(case)
        compared = Comparison(case, candidate, upstream, held=index == 0)
        compared.measure(_roundoff(dtype, case))
        for name, entry in compared.sums.items():
            sums.setdefault(name, []).append(entry)
        for name, found in compared.problems.items():
            known = problems.setdefault(name, [])
            known += [text for text in found if text not in known]
        shapes |= compared.shapes
        findings += [text for text in compared.findings if text not in findings]
        u = _roundoff(dtype, case)
    assert dtype is not None
    verdicts = [
        accuracy.judge(name, shapes[name], sums.get(name, []), u, problems.get(name, ()))
        for name in shapes
    ]
    return CheckStage(dtype, u, len(runs), tuple(verdicts), tuple(findings))


def case_dtype(case: Case) -> torch.dtype:
    """The lowest precision among parameters and floating-point inputs.

    Raises InputError when there is none, or one without a policy (float64, float8).
    """
    tensors = [t for t in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(t, Tensor)]
    for module in pytree.tree_leaves((case.module, case.args, case.kwargs)):
        if isinstance(module, nn.Module):
            tensors += list(module.parameters())
    found = {t.dtype for t in tensors if t.is_floating_point()}
    odd = found - accuracy.UNIT_ROUNDOFF.keys()
    if not found or odd:
        shown = ", ".join(sorted(map(short, odd))) or "no floating-point tensor"
        raise InputError(f"check needs bfloat16, float16 or float32 tensors: found {shown}")
    return max(found, key=lambda d: accuracy.UNIT_ROUNDOFF[d])


def _roundoff(dtype: torch.dtype, case: Case) -> float:
    leaves = [*pytree.tree_leaves((case.args, case.kwargs)), *case.module.parameters()]
    on_cuda = any(isinstance(t, Tensor) and t.is_cuda for t in leaves)
    if dtype == torch.float32 and on_cuda and torch.backends.cuda.matmul.allow_tf32:
        return accuracy.TF32_ROUNDOFF
    return accuracy.UNIT_ROUNDOFF[dtype]


class _Function(nn.Module):
    """A plain function where a module is expected; keeps its signature."""

    def __init__(self, function: Target) -> None:
        super().__init__()
        self.forward = function


def _as_module(target: Target) -> nn.Module:
    return target if isinstance(target, nn.Module) else _Function(target)


def _refused(fused: Target, plain: Case) -> Target:
    """The float32 counterpart of a fused module: the same options on a float32 copy."""
    original = getattr(fused, "original", None)
    if original is not None:
        from megafuse.api import fuse

        copied = converted(original, torch.float32)
        options = getattr(fused, "options", None)
        return fuse(copied, *plain.args, options=options, **plain.kwargs)
    return copy.deepcopy(fused).to(torch.float32) if isinstance(fused, nn.Module) else fused


def _as_list(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _silent(message: str, done: int, total: int) -> None:
    pass
