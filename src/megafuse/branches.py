"""Whether code does for a batch of one what it does for larger ones.

A trace takes its batch for 2 or more: at 1, sums over it would vanish from the graph. Code that
asks (`if x.shape[0] == 1`, `x.squeeze()`) is found by running it without data at both sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megafuse.provenance import without_logs

Step = tuple[str, tuple[int, ...]]


class _Steps(TorchFunctionMode):
    """Notes every function of torch's that is called, with the ranks of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        ranks = tuple(v.dim() for v in tree_leaves(result) if isinstance(v, torch.Tensor))
        self.steps.append((getattr(func, "__name__", str(func)), ranks))
        return result


def one_is_like_two(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    batched: Sequence[bool],
) -> bool:
    """Whether `function(tensors)` calls the same functions with a batch of 1 and of 2."""
    types = [(tuple(t.shape), t.dtype) for t in tensors]
    one, two = (_steps(function, types, batched, size) for size in (1, 2))
    return two is None or one == two


def _steps(
    function: Callable[[Sequence[torch.Tensor]], Any],
    types: Sequence[tuple[tuple[int, ...], torch.dtype]],
    batched: Sequence[bool],
    batch: int,
) -> list[Step] | None:
    """None where the code does not run."""
    with without_logs(), FakeTensorMode(), torch.no_grad():
        values = [
            torch.empty((batch, *shape[1:]) if lead else shape, dtype=dtype, device="meta")
            for (shape, dtype), lead in zip(types, batched, strict=True)
        ]
        recorder = _Steps()
        try:
            with recorder:
                function(values)
        except Exception:
            return None
        return recorder.steps
