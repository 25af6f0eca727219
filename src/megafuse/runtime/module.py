"""The drop-in module: its original's tensors and attributes, with generated kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megafuse.config import Options
from megafuse.errors import InputError
from megafuse.fusion.summary import PlanSummary
from megafuse.runtime import eligible
from megafuse.runtime.call import Call, Compiled, Values
from megafuse.runtime.executor import Progress
from megafuse.runtime.plans import Found, Plans
from megafuse.runtime.signature import PLAIN, Slots, freeze

MOST_RECENT = 1024
_TRACING = threading.RLock()
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
           "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
           "_load_state_dict_post_hooks")  # fmt: skip
_OWN = frozenset(nn.Module().__dict__)


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
        plans = Plans(original, options)
        self.__dict__.update(original=original, options=options, _book=plans, _plans=plans.filed,
                             _recent={}, _slots=None)  # fmt: skip
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
        from megafuse.device import predicted_for
        from megafuse.fusion.describe import summarize

        call = self._call(args, kwargs)
        if call is None:
            raise InputError("this call runs the original module; there is no plan to describe")
        compiled, tensors, _ = call
        sizes = compiled.plan.sizes_of(tensors)
        return summarize(compiled.plan, sizes, predicted_for(compiled.device))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """The plan for a call with its flat tensors and run-time sizes; None where PyTorch itself
        has to run it."""
        # Tracing swaps the module's parameters for a moment and uses global state of torch's: one
        # thread at a time, and none reads the parameters meanwhile.
        with _TRACING:
            simple = self._simple_call(args, kwargs)
            if simple is None:
                return self._book.find(args, kwargs)
            key, tensors = simple
            hit = self._recent.get(key)
            if hit is None:
                found = self._book.find(args, kwargs)
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
        if inputs[0].device.type not in ("cpu", "cuda"):
            return None
        if eligible.around_the_call(inputs[0].device.type) is not None:
            return None
        own: Values = []
        state: tuple[Slots, int] | None = None
        if isinstance(self.original, nn.Module):
            if self._slots is None or not self._slots.current():
                self.__dict__["_slots"] = Slots(self.original)
            if self._slots.hooked():
                return None
            own, state = self._slots.tensors(), (self._slots, self._slots.state())
        described += [(t.shape, t.stride(), t.dtype, t.requires_grad, t.device) for t in own]
        key = (tuple(described), tuple(kwargs), len(args), state, torch.is_grad_enabled(),
               torch.is_inference_mode_enabled())  # fmt: skip
        return key, own + inputs
