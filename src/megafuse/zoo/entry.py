"""What an entry of the zoo is."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Size = Literal["cpu", "gpu"]
"""cpu: small and awkward, for numbers; gpu: large enough that eager takes a millisecond or more."""

Example = tuple[nn.Module, tuple[Any, ...]]
"""A module and the arguments of one call, on the default device and in the default dtype."""

ENTRIES: dict[str, type[Entry]] = {}
"""Every entry by name, in the order defined."""


class Entry(nn.Module):
    """A subgraph as someone would write it. Subclasses give their `name` and a `case`.

    The first line of a subclass's docstring says what it is.
    """

    name: str

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        assert name not in ENTRIES, f"two entries are called {name}"
        cls.name = name
        ENTRIES[name] = cls

    @staticmethod
    def case(size: Size) -> Example:
        """The module and inputs at one of two sizes; call it after seeding."""
        raise NotImplementedError


def normal(*shape: int) -> Tensor:
    """A standard normal input that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def randomised(module: nn.Module) -> nn.Module:
    """`module` with weights and biases of its norms away from one and zero, where faults hide."""
    for part in module.modules():
        for key in ("weight", "bias", "gain", "running_mean"):
            value = getattr(part, key, None)
            if isinstance(value, Tensor) and value.dim() == 1:
                nn.init.normal_(value, 1.0 if key in ("weight", "gain") else 0.0, 0.3)
    return module


class RMSNorm(nn.Module):
    """Llama's, by hand: float32 inside, the gain applied after the cast."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.gain * wide.type_as(x)
