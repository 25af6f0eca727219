"""One forward and backward of a module, with every output and gradient by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Target = Callable[..., Any]


@dataclass
class Call:
    """Arguments of one call, as fresh leaves that share the caller's memory.

    `inputs` names every tensor argument; `parameters` every parameter of the target and of modules
    among the arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass
class Results:
    """Outputs and gradients of one step; a gradient autograd did not produce is None."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]

    def named(self) -> dict[str, Tensor | None]:
        """Outputs, then gradients, under the names a report shows."""
        return {**self.outputs, **{f"d {name}": g for name, g in self.gradients.items()}}


def bind(target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Detach the tensor arguments into leaves and name them after the target's parameters."""
    leaves_args, leaves_kwargs = pytree.tree_map(_leaf, (tuple(args), dict(kwargs)))
    inputs: dict[str, Tensor] = {}
    parameters: dict[str, Tensor] = {}
    if isinstance(target, nn.Module):
        parameters |= dict(target.named_parameters())
    for argument, value in _arguments(target, leaves_args, leaves_kwargs).items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            name = argument + pytree.keystr(path)
            if isinstance(leaf, Tensor):
                inputs[name] = leaf
            elif isinstance(leaf, nn.Module):
                parameters |= {f"{name}.{key}": p for key, p in leaf.named_parameters()}
    return Call(leaves_args, leaves_kwargs, inputs, parameters)


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _arguments(target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}


def tensor_outputs(result: Any) -> dict[str, Tensor]:
    """Name every tensor a call returned: "output", or "output[1]" and the like for a structure."""
    leaves = pytree.tree_flatten_with_path(result)[0]
    return {f"output{pytree.keystr(p)}": leaf for p, leaf in leaves if isinstance(leaf, Tensor)}


def run_step(target: Target, call: Call, grad_outputs: Sequence[Tensor] | None) -> Results:
    """Clear gradients, run forward and backward as the timed step does, and gather everything.

    `grad_outputs` holds one upstream gradient for each output that requires grad; None runs the
    forward alone. The `.grad` of every parameter is left as it was found.
    """
    leaves = {**call.inputs, **call.parameters}
    with kept_gradients(leaves.values()):
        outputs = tensor_outputs(target(*call.args, **call.kwargs))
        differentiable = [o for o in outputs.values() if o.requires_grad]
        if grad_outputs is not None and differentiable:
            torch.autograd.backward(differentiable, list(grad_outputs))
        wanted = {n: t for n, t in leaves.items() if t.requires_grad}
        gradients = {name: tensor.grad for name, tensor in wanted.items()}
    return Results({name: o.detach() for name, o in outputs.items()}, gradients)


def draw_grad_outputs(target: Target, call: Call, seed: int) -> list[Tensor]:
    """Run the forward once and draw a standard normal upstream gradient for each output."""
    with torch.enable_grad():
        outputs = tensor_outputs(target(*call.args, **call.kwargs)).values()
    return normal_like([o for o in outputs if o.requires_grad], seed)


def normal_like(tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Standard normal tensors of the same shapes, dtypes and device, from one seeded generator."""
    if not tensors:
        return []
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    return [
        torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in tensors
    ]


@contextmanager
def kept_gradients(tensors: Any) -> Iterator[None]:
    """Start with `.grad` cleared, and put back on leaving what was there before."""
    kept = [(t, t.grad) for t in tensors if t.is_leaf]
    try:
        for tensor, _ in kept:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Set the process-wide TF32 switch for CUDA matrix products, and restore it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Copy tensors and modules in a structure to `dtype`, leaving the originals alone."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, nn.Module):
            with kept_gradients(leaf.parameters()):  # a deepcopy would copy the gradients too
                return copy.deepcopy(leaf).to(dtype)
        return leaf

    return pytree.tree_map(convert, value)


class InFloat64(TorchFunctionMode):
    """Turn every cast to a lower floating-point dtype in the user's code into one to float64.

    Without it a reference that computes its norms in float32 would be no better than float32.
    """

    _FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
    _CASTS: ClassVar[dict[Any, Any]] = {
        torch.Tensor.float: torch.Tensor.double,
        torch.Tensor.half: torch.Tensor.double,
        torch.Tensor.bfloat16: torch.Tensor.double,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._widen, (args, kwargs or {}))
        return self._CASTS.get(func, func)(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in self._FLOATS:
            return torch.float64
        return value
