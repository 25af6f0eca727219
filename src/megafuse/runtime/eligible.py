"""Which calls only PyTorch itself can serve, and why: those run the original module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megafuse.ir import FUSABLE

SILENT = ""
"""The reason of calls whose service by PyTorch goes without saying: nothing to compute, or eager's
own error is the right one."""

_CLASSES = (torch.Tensor, nn.Parameter)
_GLOBAL_HOOKS = [
    getattr(nn.modules.module, f"_global_{name}")
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]


def around_the_call(device: str) -> str | None:
    """What surrounds a call that generated kernels would not see; None for nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a torch.func transform (vmap, grad, jvp, ...)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "under forward-mode differentiation"
    if _get_current_dispatch_mode() is not None or torch._C._get_tracing_state() is not None:
        return "under a mode that watches PyTorch operators (FlopCounterMode, tracing, ...)"
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return "under autocast: cast the module's parameters and inputs instead"
    if any(_GLOBAL_HOOKS):
        return "while hooks for all modules are registered"
    return None


def of_tensors(tensors: Sequence[torch.Tensor]) -> str | None:
    """What about the tensors generated kernels do not cover; None for nothing."""
    if not tensors or any(type(t) not in _CLASSES for t in tensors):
        odd = next((type(t).__name__ for t in tensors if type(t) not in _CLASSES), None)
        return SILENT if odd in (None, "FakeTensor") else f"for tensors of class {odd}"
    first = tensors[0].device
    if any(t.device != first or t.layout != torch.strided or t.numel() == 0 for t in tensors):
        return SILENT
    if first.type not in ("cpu", "cuda"):
        return SILENT
    for t in tensors:
        if t.is_quantized or t.is_complex() or (t.is_floating_point() and t.dtype not in FUSABLE):
            return f"for {t.dtype} tensors"
    return None
