"""The public face: fuse and explain. `check` lives in `megafuse.tools.check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram

from megafuse.config import Options
from megafuse.errors import InputError
from megafuse.exported import module_of
from megafuse.runtime.module import FusedModule

if TYPE_CHECKING:
    from megafuse.dynamo import Backend


def fuse(
    target: nn.Module | Callable[..., Any] | ExportedProgram,
    *example_inputs: Any,
    options: Options | None = None,
    **example_kwargs: Any,
) -> FusedModule:
    """A drop-in module that computes `target` with generated kernels, forward and backward.

    target: an `nn.Module` (an `fx.GraphModule` too), a function of tensors (and modules), or a
        `torch.export` program, whose parameters the result shares.
    example_inputs, example_kwargs: one call's arguments; with any given, the plan for such a call
        is made (not compiled) now, so that what cannot be captured raises here. Other dtypes,
        shapes and requires_grad patterns get their own plan at their first call; the leading
        (batch) dimension may change freely. Calls that only PyTorch can serve run `target`, with
        one FallbackWarning for each reason.
    options: see `Options`.

    Raises CaptureError or UnsupportedError, naming the user's line; InputError for what is neither
    module nor function.
    """
    if isinstance(target, ExportedProgram):
        target = module_of(target)
    if not callable(target):
        raise InputError(f"fuse takes an nn.Module or a function, not {type(target).__name__}")
    fused = FusedModule(target, options or Options())
    if example_inputs or example_kwargs:
        fused._call(example_inputs, example_kwargs)
    return fused


def explain(
    fused: FusedModule | Backend, *inputs: Any, html: Path | str | None = None, **kwargs: Any
) -> str:
    """The plan for this call, readable: regions, why each boundary is there, bytes, predicted time.

    With no arguments, the plan made last. Of a backend of torch.compile (`megafuse.backend`): for
    each compiled graph what was fused, and what was left to PyTorch and why. html: also write the
    plan as one self-contained page, with pictures of the graph before and after and of what memory
    holds.

    Raises InputError where there is no plan.
    """
    if not isinstance(fused, FusedModule):
        return str(fused.report())
    from megafuse.tools.explain import explain as describe
    from megafuse.tools.explain import write_page

    explanation = describe(fused, inputs, kwargs)
    if html is not None:
        write_page(explanation, html)
    return str(explanation)
