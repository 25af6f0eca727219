"""Fuse a subgraph and hand out its cases: what check, demo, bench and profile start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megafuse.config import Options
from megafuse.subgraphs import Case, Subgraph
from megafuse.tools.check import check_cases
from megafuse.tools.check_report import CheckReport
from megafuse.tools.steps import Target, bind, draw_grad_outputs
from megafuse.tools.timing import Step, training_step

if TYPE_CHECKING:
    from megafuse.fusion.summary import PlanSummary
    from megafuse.runtime.module import FusedModule

Progress = Callable[[str, int, int], None]
Fuse = Callable[..., Target]
_GRAD_SEED = 1000


def _fuse(module: nn.Module, *args: Any, options: Options, **kwargs: Any) -> Target:
    from megafuse.api import fuse

    return fuse(module, *args, options=options, **kwargs)


@dataclass
class Candidate:
    """A subgraph with its fused module, one a precision, built when first needed.

    Another seed brings new inputs and new parameter values into the module that was fused first, so
    that a plan is built once and proved on many values. `fuse` can be replaced in tests.
    """

    subgraph: Subgraph
    options: Options
    seed: int = 0
    fuse: Fuse = _fuse
    progress: Progress | None = None
    _made: dict[torch.dtype | None, tuple[int, Case, Target]] = field(default_factory=dict)

    def make(self, seed: int, dtype: torch.dtype | None = None) -> tuple[Case, Target]:
        """A case of `seed` in `dtype` (None: as asked for), and the fused module for it."""
        if dtype not in self._made:
            case = self.subgraph.case(seed, dtype)
            fused = self.fuse(case.module, *case.args, options=self.options, **case.kwargs)
            build = getattr(fused, "build", None)
            if build is not None:
                build(*case.args, progress=self.progress, **case.kwargs)
            self._made[dtype] = (seed, case, fused)
            return case, fused
        last, first_case, fused = self._made[dtype]
        if seed == last:
            return first_case, fused
        fresh = self.subgraph.case(seed, dtype)
        first_case.module.load_state_dict(fresh.module.state_dict())
        case = Case(first_case.module, fresh.args, fresh.kwargs, fresh.grad_output)
        self._made[dtype] = (seed, case, fused)
        return case, fused

    def forget(self, dtype: torch.dtype) -> None:
        """Release the module kept for `dtype`."""
        self._made.pop(dtype, None)

    def check(self, seeds: int, progress: Progress | None = None) -> CheckReport:
        """Check over `seeds` seeds from the first on, then over the same seeds in float32."""
        chosen = range(self.seed, self.seed + seeds)
        report = check_cases(self.make, chosen, progress=progress)
        self.forget(torch.float32)
        return report

    def explain(self, html: Path | None = None) -> str:
        """The plan for the first seed's sizes, readable, with the reason for each boundary. html:
        also write it as a page."""
        from megafuse.api import explain

        case, fused = self.make(self.seed)
        return explain(cast("FusedModule", fused), *case.args, html=html, **case.kwargs)

    def ready(self) -> Ready:
        """The case of the first seed, bound to everything a measurement needs."""
        case, fused = self.make(self.seed)
        grads = [case.grad_output] if case.grad_output is not None else None
        if grads is None:
            call = bind(case.module, case.args, case.kwargs)
            grads = draw_grad_outputs(case.module, call, _GRAD_SEED)
        return Ready(case, fused, grads)


@dataclass
class Ready:
    """One case with its fused module and upstream gradients (one an output)."""

    case: Case
    fused: Target
    grad_outputs: Sequence[Tensor]

    def step(self, target: Target) -> Step:
        """The measured call on `target` with this case's tensors."""
        return training_step(target, self.case.args, self.case.kwargs, self.grad_outputs)

    def clear(self) -> None:
        """Drop every gradient of the case."""
        from torch.utils import _pytree as pytree

        for leaf in pytree.tree_leaves((self.case.args, self.case.kwargs)):
            if isinstance(leaf, Tensor):
                leaf.grad = None
        self.case.module.zero_grad(set_to_none=True)

    def summary(self) -> PlanSummary | None:
        """The plan at these sizes; None for a stand-in without a plan."""
        summarize = getattr(self.fused, "summary", None)
        if summarize is None:
            return None
        return summarize(*self.case.args, **self.case.kwargs)  # type: ignore[no-any-return]
