"""One model, run eager and compiled side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from support import tensors_of
from torch import Tensor, nn

import megafuse

Target = Callable[..., Any]


def agree(
    target: Target, *calls: tuple[Any, ...], backend: Any = None, rtol: float = 1e-4,
    atol: float = 1e-5, seed: int | None = None, **kwargs: Any,
) -> megafuse.Backend:  # fmt: skip
    """Call `target` and its compiled twin with each of `calls`: outputs and their strides, what
    became of the arguments, gradients and buffers are eager's.

    seed: of PyTorch's generator before each call. kwargs: of torch.compile. Returns the backend.
    """
    torch._dynamo.reset()
    backend = backend or megafuse.Backend()
    twin = copy.deepcopy(target) if isinstance(target, nn.Module) else target
    compiled = torch.compile(twin, backend=backend, **kwargs)

    def same(a: Any, b: Any, what: str) -> None:
        assert (a is None) == (b is None), what
        if a is not None:
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )

    for args in calls:
        results = []
        for function in (target, compiled):
            mine = [fresh(a) for a in args]
            if seed is not None:
                torch.manual_seed(seed)
            outputs = tensors_of(function(*mine))
            roots = [o for o in outputs if o.requires_grad]
            if roots:
                generator = torch.Generator().manual_seed(2)
                torch.autograd.backward(
                    roots, [torch.randn(o.shape, generator=generator).to(o) for o in roots]
                )
            results.append((outputs, tensors_of(mine)))
        (eager, given), (got, taken) = results
        assert [o.requires_grad for o in got] == [o.requires_grad for o in eager]
        for i, (a, b) in enumerate(zip(got, eager, strict=True)):
            same(a, b, f"output {i}")
            assert strides(a) == strides(b), f"output {i}"
        for i, (a, b) in enumerate(zip(taken, given, strict=True)):
            same(a, b, f"argument {i}")
            same(a.grad, b.grad, f"gradient of argument {i}")
        if isinstance(target, nn.Module) and isinstance(twin, nn.Module):
            for (name, a), b in zip(twin.named_parameters(), target.parameters(), strict=True):
                same(a.grad, b.grad, f"gradient of {name}")
            for (name, a), b in zip(twin.named_buffers(), target.buffers(), strict=True):
                same(a, b, f"buffer {name}")
    return backend  # type: ignore[no-any-return]


def fresh(value: Any) -> Any:
    """A leaf of its own with the same strides."""
    if not isinstance(value, Tensor):
        return value
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return new.copy_(value.detach()).requires_grad_(value.requires_grad)


def strides(x: Tensor) -> list[int]:
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def reasons(backend: megafuse.Backend) -> dict[str, str]:
    """Why each operator was left to PyTorch, by its short name."""
    return {o.name.split(".")[1]: o.reason for o in backend.report().left}


def fused(backend: megafuse.Backend) -> int:
    """Operators inside generated kernels, of all graphs."""
    return sum(g.fused_operators for g in backend.report().graphs)
