"""The plans of one module or function: finds the one a call may use, or makes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megafuse import dump
from megafuse.branches import one_is_like_two
from megafuse.capture import batched
from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.errors import FallbackWarning, UnsupportedError
from megafuse.layouts import Layouts, Strides, probe, strides_of
from megafuse.runtime import eligible
from megafuse.runtime.call import Compiled, Values
from megafuse.runtime.executor import has_epilogues
from megafuse.runtime.signature import (
    Signature,
    freeze,
    hooked,
    leading,
    named_tensors,
    state_of,
    unchanged,
)

MOST_NUMBERS = 8
"""Plans that differ in plain numbers only; calls with yet other numbers run the original."""

Target = nn.Module | Callable[..., Any]
Found = tuple[Compiled, Values, tuple[int, ...]]
"""A plan, the call's flat tensors, and its run-time sizes in order of name."""

Key = tuple[Signature, bool, Layouts | None]
"""What plans are filed under: signature, whether the batch is a run-time size, eager's layouts."""


@dataclass
class _Request:
    """One call, taken apart. tensors: parameters and buffers of `modules`, `own` of them in the
    order of `names`, then the tensors among the flat arguments, at `places`."""

    flat: list[Any]
    spec: TreeSpec
    modules: list[nn.Module]
    names: list[tuple[int, str]]
    places: list[int]
    tensors: Values
    own: int

    @classmethod
    def of(cls, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request:
        flat, spec = tree_flatten((args, kwargs))
        modules = [v for v in flat if isinstance(v, nn.Module)]
        if isinstance(target, nn.Module):
            modules.insert(0, target)
        names = [(i, n) for i, module in enumerate(modules) for n, _ in named_tensors(module)]
        tensors = [t for module in modules for _, t in named_tensors(module)]
        places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        own = len(tensors)
        return cls(flat, spec, modules, names, places, tensors + [flat[i] for i in places], own)

    @property
    def parameters(self) -> list[bool]:
        return [i < self.own for i in range(len(self.tensors))]

    @property
    def needs_grad(self) -> list[bool]:
        grad = torch.is_grad_enabled()
        return [grad and t.requires_grad for t in self.tensors]

    @property
    def strides(self) -> tuple[Strides, ...]:
        return tuple(map(strides_of, self.tensors))

    def signature(self) -> Signature:
        described = []
        for t, own, wants in zip(self.tensors, self.parameters, self.needs_grad, strict=True):
            shape = tuple(t.shape)
            described.append((shape if own or not shape else shape[1:], len(shape), t.dtype, wants))
        constants = [freeze(v) for i, v in enumerate(self.flat) if i not in self.places]
        return Signature(
            repr(self.spec), tuple(constants), state_of(self.modules), tuple(self.names),
            (*described, self.tensors[0].device, leading(self.tensors[self.own :])),
        )  # fmt: skip

    def function(self, target: Target) -> Callable[[Sequence[torch.Tensor]], Any]:
        """The call as a function of its flat tensors.

        Raises UnsupportedError when the code assigns another tensor to a parameter or buffer.
        """

        def function(values: Sequence[torch.Tensor]) -> Any:
            leaves = list(self.flat)
            for place, value in zip(self.places, values[self.own :], strict=True):
                leaves[place] = value
            with ExitStack() as stack:
                held = []
                for i, module in enumerate(self.modules):
                    mine = {n: v for (j, n), v in zip(self.names, values, strict=False) if j == i}
                    stack.enter_context(_holding(module, mine))
                    held.append(mine)
                args, kwargs = tree_unflatten(leaves, self.spec)
                result = target(*args, **kwargs)
                for module, mine in zip(self.modules, held, strict=True):
                    for name, tensor in named_tensors(module):
                        if mine.get(name) is not tensor:
                            raise UnsupportedError(
                                f"the code assigns a new tensor to {name!r}; write buffers in "
                                f"place instead: self.{name}.copy_(...)"
                            )
                return result

        return function


class Plans:
    """Plans of `target`, filed by what they assume; made when a call needs one."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target, self.options = target, options
        self.filed: dict[Key, list[Compiled]] = {}
        self._layouts: dict[tuple[Signature, bool, tuple[Strides, ...]], Layouts | None] = {}
        self._ones: dict[Signature, bool] = {}
        self._numbers: dict[Any, list[Signature]] = {}
        self._told: set[Any] = set()

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """The plan for a call; None where PyTorch itself has to run it.

        Raises CaptureError, UnsupportedError.
        """
        request = _Request.of(self.target, args, kwargs)
        reason = _reason(request)
        if reason is not None:
            self._tell(reason)
            return None
        signature = request.signature()
        for dynamic in (True, False):
            if dynamic and not self._may_be_dynamic(request, signature):
                continue
            laid = (signature, dynamic, request.strides)
            if laid not in self._layouts:
                if not self._admits(signature):
                    return None
                self._layouts[laid] = self._probe(request, dynamic)
            key: Key = (signature, dynamic, self._layouts[laid])
            found = self._filed(key, request.tensors) or self._make(key, request)
            if found is not None:
                return found
            self._ones[signature] = False
        raise AssertionError("a plan for one batch size fits that batch size")

    def _may_be_dynamic(self, request: _Request, signature: Signature) -> bool:
        """Whether a plan for batches of 2 or more may serve this one."""
        leads = batched(request.tensors, request.parameters)
        if not any(b and t.shape[0] == 1 for b, t in zip(leads, request.tensors, strict=True)):
            return True
        if signature not in self._ones:
            function = request.function(self.target)
            with unchanged(request.modules):
                self._ones[signature] = one_is_like_two(function, request.tensors, leads)
        return self._ones[signature]

    def _probe(self, request: _Request, dynamic: bool) -> Layouts | None:
        leads = batched(request.tensors, request.parameters)
        with unchanged(request.modules):
            return probe(
                request.function(self.target), request.tensors, request.needs_grad,
                [dynamic and lead for lead in leads],
            )  # fmt: skip

    def _filed(self, key: Key, tensors: Values) -> Found | None:
        """A plan already made under `key` whose assumptions hold for `tensors`."""
        for compiled in self.filed.get(key, ()):
            if (sizes := _fits(compiled.plan, tensors)) is not None:
                return compiled, tensors, sizes
        return None

    def _make(self, key: Key, request: _Request) -> Found | None:
        """A new plan; None if it turns out not to fit the call it was made for, whose batch is
        smaller than traces assume."""
        _, dynamic, layouts = key
        device = request.tensors[0].device
        with unchanged(request.modules):
            plan = make_plan(
                request.function(self.target), request.tensors, request.parameters,
                request.needs_grad, self.target if isinstance(self.target, nn.Module) else None,
                self.options, dump.observer(self.options),
                has_epilogues(device, self.options), layouts, dynamic, device.type == "cuda",
            )  # fmt: skip
        sizes = _fits(plan, request.tensors)
        if sizes is None:
            return None
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        compiled = Compiled(plan, device, self.options)
        self.filed.setdefault(key, []).append(compiled)
        return compiled, request.tensors, sizes

    def _admits(self, signature: Signature) -> bool:
        """Whether another plan may be made; of those that differ in plain numbers only a few."""
        numberless = signature.without_numbers()
        known = self._numbers.setdefault(numberless, [])
        if signature in known:
            return True
        if len(known) < MOST_NUMBERS:
            known.append(signature)
            return True
        names = ", ".join(signature.differences(known[-1]))
        self._tell(
            f"once {MOST_NUMBERS} plans have been made for other values of {names}: a plain number "
            "is part of a plan; one that keeps changing belongs in a tensor without dimensions, "
            "as an argument or a buffer",
            numberless,
        )
        return False

    def _tell(self, reason: str, about: Any = None) -> None:
        """Say why calls run the original, once for each reason (or for each `about`)."""
        if reason != eligible.SILENT and (about or reason) not in self._told:
            self._told.add(about or reason)
            name = getattr(self.target, "__name__", type(self.target).__name__)
            warnings.warn(f"{name} runs unfused {reason}.", FallbackWarning, stacklevel=2)


def _reason(request: _Request) -> str | None:
    """Why only PyTorch itself can serve a call; None if a plan can."""
    reason = eligible.of_tensors(request.tensors)
    if reason is None:
        reason = eligible.around_the_call(request.tensors[0].device.type)
    if reason is None and (paths := hooked(request.modules)):
        reason = f"while hooks are registered on {', '.join(paths)}"
    return reason


@contextmanager
def _holding(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`module` with other tensors in place of its own, which are known by name; tensors and modules
    that occur in several places hold the same one everywhere."""
    new = {id(old): tensors[name] for name, old in named_tensors(module)}
    places = [
        (store, name, old)
        for m in module.modules() for store in (m._parameters, m._buffers)
        for name, old in store.items() if old is not None
    ]  # fmt: skip
    try:
        for store, name, old in places:
            store[name] = new[id(old)]  # type: ignore[assignment, index]
        yield
    finally:
        for store, name, old in places:
            store[name] = old  # type: ignore[assignment, index]


def _fits(plan: Plan, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """The run-time sizes of a call in order of name, if static extents agree and guards hold
    (leading extents are not in the signature)."""
    for node, tensor in zip(plan.captured.graph.inputs, tensors, strict=False):
        for expected, actual in zip(node.shape, tensor.shape, strict=True):
            if isinstance(expected, int) and expected != actual:
                return None
    sizes = plan.sizes_of(tensors)
    if not plan.captured.accepts(sizes):
        return None
    return tuple(sizes[name] for name in sorted(sizes))
