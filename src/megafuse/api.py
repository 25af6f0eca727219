"""The public face: fuse and explain. `check` lives in `megafuse.tools.check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megafuse.config import Options
from megafuse.runtime.module import FusedModule


def fuse(
    target: nn.Module | Callable[..., Any],
    *example_inputs: Any,
    options: Options | None = None,
    **example_kwargs: Any,
) -> FusedModule:
    """A drop-in module that computes `target` with generated kernels, forward and backward.

    target: an `nn.Module`, or a function of tensors (and modules).
    example_inputs, example_kwargs: one call's arguments; with any given, the plan for such a call
        is made (not compiled) now, so that what cannot be captured raises here. Other dtypes,
        shapes and requires_grad patterns get their own plan at their first call; the leading
        (batch) dimension may change freely. Calls that only PyTorch can serve run `target`, with
        one FallbackWarning for each reason.
    options: see `Options`.

    Raises CaptureError or UnsupportedError, naming the user's line.
    """
    fused = FusedModule(target, options or Options())
    if example_inputs or example_kwargs:
        fused._call(example_inputs, example_kwargs)
    return fused


def explain(fused: FusedModule, *inputs: Any, **kwargs: Any) -> str:
    """The plan for this call, readable: regions, why each boundary is there, bytes, predicted time.

    With no arguments, the plan made last.
    """
    from megafuse.fusion.describe import explain as describe

    return describe(fused, *inputs, **kwargs)
