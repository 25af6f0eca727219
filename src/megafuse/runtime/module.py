"""The drop-in module: keys a call, finds or makes its plan, and runs it under autograd."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megafuse import dump
from megafuse.branches import one_is_like_two
from megafuse.capture import batched
from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.errors import FallbackWarning, InputError, UnsupportedError
from megafuse.fusion.summary import PlanSummary
from megafuse.layouts import probe, strides_of
from megafuse.runtime import eligible
from megafuse.runtime.call import Call, Compiled, Values
from megafuse.runtime.executor import Progress
from megafuse.runtime.signature import (
    PLAIN,
    Signature,
    Slots,
    freeze,
    hooked,
    leading,
    named_tensors,
    state_of,
    unchanged,
)

MOST_RECENT = 1024
MOST_NUMBERS = 8
"""Plans that differ in plain numbers only; calls with yet other numbers run the original."""

_TRACING = threading.RLock()
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
           "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
           "_load_state_dict_post_hooks")  # fmt: skip
_OWN = frozenset(nn.Module().__dict__)

Found = tuple[Compiled, Values, tuple[int, ...]]


class FusedModule(nn.Module):
    """`original` with generated kernels: same parameters, state_dict, signature and results.

    Parameters, buffers and attributes are the original's own, shared both ways. Plans are made on
    first use for each combination of dtypes, static shapes, requires_grad pattern, modes, plain
    arguments and attributes; the batch size may change freely. Calls that only PyTorch can serve
    run the original, and a FallbackWarning says so once for each reason.
    """

    _is_fused = True

    def __init__(self, original: nn.Module | Callable[..., Any], options: Options) -> None:
        super().__init__()
        own: dict[str, Any] = {
            "original": original, "options": options, "_plans": {}, "_layouts": {}, "_recent": {},
            "_slots": None, "_ones": {}, "_told": set(),
            "_numbers": {},
        }  # fmt: skip
        self.__dict__.update(own)
        if isinstance(original, nn.Module):
            self.__dict__["training"] = original.training
            self.__dict__.update({store: getattr(original, store) for store in _SHARED})

    # -- being the original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("original")
        if name in _OWN or not isinstance(original, nn.Module):
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

    def __delattr__(self, name: str) -> None:
        original = self.__dict__.get("original")
        if isinstance(original, nn.Module):
            delattr(original, name)
        else:
            super().__delattr__(name)

    def __getitem__(self, key: Any) -> Any:
        return self.original[key]

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.original)

    def __bool__(self) -> bool:
        return True

    def train(self, mode: bool = True) -> FusedModule:
        super().train(mode)
        if isinstance(self.original, nn.Module):
            self.original.train(mode)
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self._module()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._module()._load_from_state_dict(*args)

    def get_extra_state(self) -> Any:
        return self._module().get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        self._module().set_extra_state(state)

    def _apply(self, *args: Any, **kwargs: Any) -> FusedModule:
        self._module()._apply(*args, **kwargs)
        return self

    def _module(self) -> nn.Module:
        """Where the original defines how its tensors are saved and moved."""
        return self.original if isinstance(self.original, nn.Module) else nn.Module()

    def __reduce__(self) -> Any:
        hooks = {name: self.__dict__[name] for name in _OWN if name.endswith("_hooks")}
        return FusedModule, (self.original, self.options), hooks

    def extra_repr(self) -> str:
        count = sum(map(len, self._plans.values()))
        return f"fused: {type(self.original).__name__}, {count} plans"

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiler around this one sees PyTorch operators
            return self.original(*args, **kwargs)
        call = self._call(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        compiled, tensors, sizes = call
        outputs: Sequence[torch.Tensor]
        if compiled.plan.backward is None:
            with torch.no_grad():
                outputs, _, _ = compiled.run_forward(tensors, sizes)
        else:
            outputs = Call.apply(compiled, sizes, *tensors)
        return compiled.plan.captured.rebuild(outputs, compiled.views(tensors))

    def build(self, *args: Any, progress: Progress | None = None, **kwargs: Any) -> Compiled | None:
        """Capture, plan and compile for this call now. progress(message, done, total) is told of
        every kernel. Returns None where such a call runs the original."""
        call = self._call(args, kwargs)
        if call is None:
            return None
        call[0].build(progress)
        return call[0]

    def summary(self, *args: Any, **kwargs: Any) -> PlanSummary:
        """What the plan for this call moves and computes; see `PlanSummary`."""
        from megafuse.device import H200, spec_for
        from megafuse.fusion.describe import summarize

        call = self._call(args, kwargs)
        if call is None:
            raise InputError("this call runs the original module; there is no plan to describe")
        compiled, tensors, _ = call
        spec = spec_for(compiled.device) if compiled.device.type == "cuda" else H200
        return summarize(compiled.plan, compiled.plan.sizes_of(tensors), spec)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """The plan for a call with its flat tensors and run-time sizes; None where PyTorch itself
        has to run it."""
        # Tracing swaps the module's parameters for a moment and uses global state of torch's: one
        # thread at a time, and none reads the parameters meanwhile.
        with _TRACING:
            simple = self._simple_call(args, kwargs)
            if simple is None:
                return self._find(args, kwargs)
            key, tensors = simple
            hit = self._recent.get(key)
            if hit is None:
                found = self._find(args, kwargs)
                if found is None:
                    return None
                if len(self._recent) >= MOST_RECENT:
                    self._recent.clear()
                hit = self._recent[key] = found[0], found[2]
            return hit[0], tensors, hit[1]

    def _simple_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Values] | None:
        """A cheap key for the common call, tensors and plain values only, with its flat tensors;
        None when the call needs a closer look."""
        described: list[Any] = []
        inputs: Values = []
        for value in (*args, *kwargs.values()):
            if type(value) is torch.Tensor:
                inputs.append(value)
                described.append((value.shape, value.stride(), value.dtype, value.requires_grad,
                                  value.device))  # fmt: skip
            elif value is None or type(value) in PLAIN:
                described.append(freeze(value))
            else:
                return None
        if not inputs or any(v.layout != torch.strided for v in inputs):
            return None
        if eligible.around_the_call(inputs[0].device.type) is not None:
            return None
        own: Values = []
        state: tuple[Any, ...] = ()
        if isinstance(self.original, nn.Module):
            if self._slots is None or not self._slots.current():
                self.__dict__["_slots"] = Slots(self.original)
            if self._slots.hooked():
                return None
            own, state = self._slots.tensors(), self._slots.state()
        described += [(t.shape, t.stride(), t.dtype, t.requires_grad, t.device) for t in own]
        key = (tuple(described), tuple(kwargs), len(args), state, torch.is_grad_enabled(),
               torch.is_inference_mode_enabled())  # fmt: skip
        return key, own + inputs

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        flat, spec = tree_flatten((args, kwargs))
        modules = [v for v in flat if isinstance(v, nn.Module)]
        if isinstance(self.original, nn.Module):
            modules.insert(0, self.original)
        names = [(i, n) for i, module in enumerate(modules) for n, _ in named_tensors(module)]
        tensors = [t for module in modules for _, t in named_tensors(module)]
        own = len(tensors)
        places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        tensors += [flat[i] for i in places]
        reason = self._reason(tensors, modules)
        if reason is not None:
            self._tell(reason)
            return None
        grad = torch.is_grad_enabled()
        described = []
        for i, t in enumerate(tensors):
            shape = tuple(t.shape)
            described.append((
                shape if i < own or not shape else shape[1:], len(shape), t.dtype,
                grad and t.requires_grad, i < own,
            ))  # fmt: skip
        signature = Signature(
            repr(spec), tuple(freeze(v) for i, v in enumerate(flat) if i not in places),
            state_of(modules), tuple(names),
            (*described, tensors[0].device, leading(tensors[own:])),
        )  # fmt: skip
        function = self._function(flat, spec, places, modules, names, own)
        parameters = [i < own for i in range(len(tensors))]
        leads = batched(tensors, parameters)
        dynamic = True
        if any(lead and t.shape[0] == 1 for lead, t in zip(leads, tensors, strict=True)):
            if signature not in self._ones:
                self._ones[signature] = one_is_like_two(function, tensors, leads)
            dynamic = self._ones[signature]
        laid = signature, dynamic, tuple(map(strides_of, tensors))
        if laid in self._layouts:
            found = self._planned((*laid[:2], self._layouts[laid]), tensors)
            if found is not None:
                return found
        known = self._numbers.setdefault(signature.without_numbers(), [])
        if signature not in known:
            if len(known) >= MOST_NUMBERS:
                names_of = ", ".join(signature.differences(known[-1]))
                reason = (
                    f"once {MOST_NUMBERS} plans have been made for other values of {names_of}: a "
                    "plain number is part of a plan; one that keeps changing belongs in a tensor "
                    "without dimensions, as an argument or a buffer"
                )
                self._tell(reason, signature.without_numbers())
                return None
            known.append(signature)
        needs_grad = [grad and t.requires_grad for t in tensors]
        with unchanged(modules):
            if laid not in self._layouts:
                sizes = leads if dynamic else [False] * len(tensors)
                self._layouts[laid] = probe(function, tensors, needs_grad, sizes)
            key = *laid[:2], self._layouts[laid]
            found = self._planned(key, tensors)
            if found is None:
                plan = make_plan(
                    function, tensors, parameters, needs_grad,
                    self.original if isinstance(self.original, nn.Module) else None, self.options,
                    dump.observer(self.options), self._has_epilogues(tensors[0].device), key[2],
                    dynamic,
                )  # fmt: skip
        if found is not None:
            return found
        device = tensors[0].device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        compiled = Compiled(plan, device, self.options)
        self._plans.setdefault(key, []).append(compiled)
        return compiled, tensors, _values(plan.sizes_of(tensors))

    def _planned(self, key: Any, tensors: Values) -> Found | None:
        """A plan already made under `key` whose assumptions hold for `tensors`."""
        for compiled in self._plans.get(key, ()):
            sizes = compiled.plan.sizes_of(tensors)
            if _fits(compiled.plan, tensors) and compiled.plan.captured.accepts(sizes):
                return compiled, tensors, _values(sizes)
        return None

    def _reason(self, tensors: Values, modules: Sequence[nn.Module]) -> str | None:
        """Why only PyTorch itself can serve a call; None if a plan can."""
        reason = eligible.of_tensors(tensors)
        if reason is None:
            reason = eligible.around_the_call(tensors[0].device.type)
        if reason is None and (paths := hooked(modules)):
            reason = f"while hooks are registered on {', '.join(paths)}"
        return reason

    def _tell(self, reason: str, about: Any = None) -> None:
        """Say why calls run the original module, once for each reason (or for each `about`)."""
        if reason != eligible.SILENT and (about or reason) not in self._told:
            self._told.add(about or reason)
            name = getattr(self.original, "__name__", type(self.original).__name__)
            warnings.warn(f"{name} runs unfused {reason}.", FallbackWarning, stacklevel=2)

    def _has_epilogues(self, device: torch.device) -> bool:
        """Whether 16-bit products run on our Hopper kernel, which can add before it stores."""
        if self.options.rounding == "eager" or self.options.executor != "auto":
            return False
        return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)

    def _function(
        self, flat: list[Any], spec: TreeSpec, places: list[int], modules: list[nn.Module],
        names: list[tuple[int, str]], own: int,
    ) -> Callable[[Sequence[torch.Tensor]], Any]:  # fmt: skip
        """The call as a function of its flat tensors.

        Raises UnsupportedError when the code assigns another tensor to a parameter or buffer.
        """
        original = self.original

        def function(values: Sequence[torch.Tensor]) -> Any:
            leaves = list(flat)
            for place, value in zip(places, values[own:], strict=True):
                leaves[place] = value
            with ExitStack() as stack:
                swapped = []
                for i, module in enumerate(modules):
                    mine = {n: v for (j, n), v in zip(names, values, strict=False) if j == i}
                    stack.enter_context(_holding(module, mine))
                    swapped.append(mine)
                call_args, call_kwargs = tree_unflatten(leaves, spec)
                result = original(*call_args, **call_kwargs)
                for module, mine in zip(modules, swapped, strict=True):
                    for name, tensor in named_tensors(module):
                        if mine.get(name) is not tensor:
                            raise UnsupportedError(
                                f"the code assigns a new tensor to {name!r}; write buffers in "
                                f"place instead: self.{name}.copy_(...)"
                            )
                return result

        return function


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


def _values(sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[name] for name in sorted(sizes))


def _fits(plan: Plan, tensors: Sequence[torch.Tensor]) -> bool:
    """Static extents agree (leading ones are not in the signature)."""
    for node, tensor in zip(plan.captured.graph.inputs, tensors, strict=False):
        for expected, actual in zip(node.shape, tensor.shape, strict=True):
            if isinstance(expected, int) and expected != actual:
                return False
    return True
