"""What a fused module must share with the one it replaces: values, layouts, memory, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import tensors_of
from torch import Tensor, nn

import megafuse
from megafuse import FusedModule


class Net(nn.Module):
    """A product, a norm, a buffer and an activation."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.lin(x)) + self.shift) * x


def seeded(make: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def draw(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1, grad: bool = True
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def run(
    target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
    upstream: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """Outputs, and gradients of every tensor argument and parameter that wants one."""
    outputs = tensors_of(target(*args, **kwargs))
    wanted = [t for t in tensors_of([args, kwargs]) if t.requires_grad]
    if isinstance(target, nn.Module):
        wanted += [p for p in target.parameters() if p.requires_grad]
    roots = [o for o in outputs if o.requires_grad]
    if not roots or not wanted:
        return outputs, []
    upstream = upstream or [
        torch.empty_like(o).copy_(draw(*o.shape, dtype=o.dtype, seed=7 + i, grad=False))
        for i, o in enumerate(roots)
    ]
    return outputs, list(torch.autograd.grad(roots, wanted, list(upstream), allow_unused=True))


def agree(
    target: Callable[..., Any], *args: Any, fused: FusedModule | None = None,
    upstream: Sequence[Tensor] | None = None, rtol: float = 1e-4, atol: float = 1e-5,
    **kwargs: Any,
) -> FusedModule:  # fmt: skip
    """Fused and eager agree on values, strides, requires_grad, memory shared with the arguments,
    and gradients with their strides; and it was generated code that ran. Returns the fused one."""
    fused = fused or megafuse.fuse(target)
    got, got_grads = run(fused, args, kwargs, upstream)
    want, want_grads = run(target, args, kwargs, upstream)
    memory = {t.untyped_storage().data_ptr() for t in tensors_of([args, kwargs])}
    assert len(got) == len(want) and len(got_grads) == len(want_grads)
    for i, (a, b) in enumerate(zip(got, want)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert steps(a) == steps(b), f"output {i}: strides {a.stride()}, eager's {b.stride()}"
        assert a.requires_grad == b.requires_grad, f"output {i}"
        shared = [t.untyped_storage().data_ptr() in memory for t in (a, b)]
        assert shared[0] == shared[1], f"output {i}: memory shared with an argument, {shared}"
    for i, (a, b) in enumerate(zip(got_grads, want_grads)):
        assert (a is None) == (b is None), f"gradient {i}"
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda t, i=i: f"{i}: {t}")
            expanded = 0 in b.stride()  # eager keeps a broadcast unwritten; that is its right
            assert expanded or steps(a) == steps(b), f"gradient {i}: {a.stride()}, {b.stride()}"
    assert_generated(fused)
    return fused


def steps(x: Tensor) -> list[int]:
    """Strides of the extents that have any."""
    return [step for extent, step in zip(x.shape, x.stride(), strict=True) if extent > 1]


def compiled_of(fused: FusedModule) -> list[Any]:
    return [c for same in fused._plans.values() for c in same]


def assert_generated(fused: FusedModule) -> None:
    """A plan was made, its forward has regions of generated code, and it has run."""
    made = compiled_of(fused)
    assert made and all(c.forward is not None and c.forward.recipes for c in made)
    assert any(c.forward.built for c in made)
