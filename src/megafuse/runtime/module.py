"""The drop-in module: keys a call, finds or makes its plan, and runs it under autograd."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megafuse import dump
from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.errors import DoubleBackwardError, InputError
from megafuse.fusion.summary import PlanSummary
from megafuse.ir import FUSABLE
from megafuse.runtime.executor import Executor, Progress
from megafuse.runtime.reference import interpret


@dataclass
class Compiled:
    """A plan with an executor for each direction, made on first use."""

    plan: Plan
    device: torch.device
    options: Options
    forward: Executor | None = None
    backward: Executor | None = None

    def build(self, progress: Progress | None = None) -> None:
        if self.options.executor == "reference":
            return
        if self.forward is None:
            self.forward = Executor(self.plan.forward, self.device, self.options, progress)
        if self.backward is None and self.plan.backward is not None:
            self.backward = Executor(self.plan.backward, self.device, self.options, progress)

    def run_forward(self, tensors: list[torch.Tensor], sizes: tuple[int, ...]) -> list[Any]:
        if self.options.executor == "reference":
            return interpret(self.plan.split.forward)(*tensors)
        if self.forward is None:
            self.build()
        assert self.forward is not None
        return self.forward.run(tensors, sizes)

    def run_backward(self, tensors: list[torch.Tensor], sizes: tuple[int, ...]) -> list[Any]:
        assert self.plan.split.backward is not None
        if self.options.executor == "reference":
            return interpret(self.plan.split.backward)(*tensors)
        if self.backward is None:
            self.build()
        assert self.backward is not None
        return self.backward.run(tensors, sizes)


def _hooks_on_saved() -> bool:
    """Whether the caller asked autograd to transform what is saved for backward."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _watched() -> bool:
    """Whether something would see PyTorch operators only: a torch.func transform, forward-mode
    differentiation, a tracer or another dispatch mode. Then the original runs."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def _is_batched(tensor: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor object each: a value returned twice, once detached, is two to autograd."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        result.append(tensor.detach() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return result


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as kernels read it: contiguous and 16-byte aligned; itself if it is that already."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    if tensor.data_ptr() % 16:
        return tensor.clone()
    return tensor


class _Call(torch.autograd.Function):
    """One call of a plan. Saves the tensors backward reads and the values forward kept for it."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, sizes: tuple[int, ...], *tensors: torch.Tensor
    ) -> Any:
        plan = compiled.plan
        plain = [_plain(t) for t in tensors]
        results = compiled.run_forward(list(plain), sizes)
        outputs = _distinct(results[: plan.captured.outputs])
        ctx.compiled, ctx.sizes = compiled, sizes
        ctx.set_materialize_grads(False)
        kept = results[plan.captured.outputs :]
        # Values only this call knows are held here rather than by autograd, so that backward can
        # drop each after its last use; hooks on saved tensors (checkpointing, offloading) see them.
        ctx.kept = None if _hooks_on_saved() else kept
        ctx.save_for_backward(*plain, *(kept if ctx.kept is None else ()))
        fixed = [o for i, o in enumerate(outputs) if i not in plan.captured.differentiable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        compiled: Compiled = ctx.compiled
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "the fused module computes first derivatives only; for create_graph=True or "
                "gradients of gradients call the original module (`fused.original`)."
            )
        if any(g is not None and _is_batched(g) for g in grads):
            raise DoubleBackwardError(
                "the fused module's backward runs on one upstream gradient at a time; for "
                "is_grads_batched=True or vmap over gradients call the original module "
                "(`fused.original`)."
            )
        upstream, absent = [], set()
        for k, i in enumerate(compiled.plan.captured.differentiable):
            grad = grads[i]
            if grad is None:
                absent.add(k)
                shape, dtype, device = ctx.like[i]
                grad = torch.zeros(shape, dtype=dtype, device=device)
            upstream.append(_plain(grad))
        tensors = [*ctx.saved_tensors]
        if ctx.kept is not None:
            tensors += ctx.kept
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                ctx.kept = None
        tensors += upstream
        del upstream
        results = compiled.run_backward(tensors, ctx.sizes)
        if absent:  # what only an unused output leads to has no gradient, rather than a zero one
            sources = compiled.plan.sources
            results = [None if s <= absent else r for r, s in zip(results, sources, strict=True)]
        return (None, None, *results)


@dataclass(frozen=True)
class _Signature:
    """What a plan assumes about a call besides its run-time sizes."""

    spec: object
    constants: tuple[Any, ...]
    tensors: tuple[Any, ...]


class FusedModule(nn.Module):
    """`original` with generated kernels: same parameters, state_dict, signature and results.

    Parameters and buffers are the original's own objects, shared both ways. Plans are made on first
    use for each combination of dtypes, static shapes, requires_grad pattern and non-tensor
    arguments; the batch size may change freely.
    """

    def __init__(self, original: nn.Module | Callable[..., Any], options: Options) -> None:
        super().__init__()
        object.__setattr__(self, "original", original)
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "_plans", {})
        object.__setattr__(self, "_recent", {})
        object.__setattr__(self, "_slots", None)
        if isinstance(original, nn.Module):
            self.training = original.training
            for store in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                object.__setattr__(self, store, getattr(original, store))

    # -- being the original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            return getattr(original, name)

    def train(self, mode: bool = True) -> FusedModule:
        super().train(mode)
        if isinstance(self.original, nn.Module):
            self.original.train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModule:
        return FusedModule(copy.deepcopy(self.original, memo), self.options)

    def __reduce__(self) -> Any:
        return FusedModule, (self.original, self.options)

    def extra_repr(self) -> str:
        return f"fused: {type(self.original).__name__}, {len(self._plans)} plans"

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        compiled, tensors, sizes = call
        rebuild = compiled.plan.captured.rebuild
        if compiled.plan.backward is None:
            with torch.no_grad():
                results = compiled.run_forward([_plain(t) for t in tensors], sizes)
            return rebuild(results[: compiled.plan.captured.outputs])
        return rebuild(_Call.apply(compiled, sizes, *tensors))

    def build(
        self, *args: Any, progress: Progress | None = None, **kwargs: Any
    ) -> Compiled | None:
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

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Compiled, list[torch.Tensor], tuple[int, ...]] | None:
        """The plan for a call with its flat tensors and run-time sizes; None where PyTorch itself
        has to run it."""
        if _watched():
            return None
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
    ) -> tuple[Any, list[torch.Tensor]] | None:
        """A cheap key for the common call, tensors and plain values only, with its flat tensors;
        None when the call needs a closer look."""
        values = [*args, *kwargs.values()]
        described: list[Any] = []
        inputs: list[torch.Tensor] = []
        for value in values:
            if type(value) is torch.Tensor:
                inputs.append(value)
                described.append(
                    (value.shape, value.dtype, value.requires_grad, value.device, value.layout)
                )
            elif value is None or type(value) in _PLAIN:
                described.append((type(value), value))
            else:
                return None
        device = inputs[0].device.type if inputs else ""
        if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
            return None
        own = self._own_tensors()
        state = [(t.shape, t.dtype, t.requires_grad, t.device) for t in own]
        key = (tuple(described), tuple(kwargs), len(args), tuple(state), self._modes(),
               torch.is_grad_enabled(), torch.is_inference_mode_enabled())  # fmt: skip
        return key, own + inputs

    def _own_tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, as `_named_tensors` lists them; walks the modules again only
        when one has been replaced."""
        if not isinstance(self.original, nn.Module):
            return []
        if self._slots is None or not self._slots.current():
            object.__setattr__(self, "_slots", _Slots(self.original))
        return self._slots.tensors()  # type: ignore[no-any-return]

    def _modes(self) -> tuple[Any, ...]:
        """The modes of the original's modules, listed by the slots just read."""
        return _modes(self._slots.modules) if self._slots is not None else ()

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Compiled, list[torch.Tensor], tuple[int, ...]] | None:
        flat, spec = tree_flatten((args, kwargs))
        modules = [v for v in flat if isinstance(v, nn.Module)]
        if isinstance(self.original, nn.Module):
            modules.insert(0, self.original)
        names: list[tuple[int, str]] = []
        tensors: list[torch.Tensor] = []
        for i, module in enumerate(modules):
            for name, tensor in _named_tensors(module):
                names.append((i, name))
                tensors.append(tensor)
        own = len(tensors)
        places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        tensors += [flat[i] for i in places]
        if not self._fusable(tensors):
            return None
        differentiable = torch.is_grad_enabled()
        described = []
        for i, t in enumerate(tensors):
            shape = tuple(t.shape)
            described.append((
                shape if i < own or not shape else shape[1:], len(shape), t.dtype,
                differentiable and t.requires_grad, i < own,
            ))  # fmt: skip
        constants = tuple(_freeze(v) for i, v in enumerate(flat) if i not in places)
        signature = _Signature(
            repr(spec), (*constants, tensors[own].device if places else None,
                   _modes(m for root in modules for m in root.modules()),
                   tuple(names), _leading(tensors[own:])),
            tuple(described),
        )  # fmt: skip
        for compiled in self._plans.get(signature, ()):
            sizes = compiled.plan.sizes_of(tensors)
            if _fits(compiled.plan, tensors) and compiled.plan.captured.accepts(sizes):
                return compiled, tensors, tuple(sizes[k] for k in sorted(sizes))
        compiled = self._compile(flat, spec, places, modules, names, tensors, own)
        self._plans.setdefault(signature, []).append(compiled)
        sizes = compiled.plan.sizes_of(tensors)
        return compiled, tensors, tuple(sizes[k] for k in sorted(sizes))

    def _fusable(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Calls that only PyTorch itself can serve run the original."""
        if not tensors or any(t.numel() == 0 for t in tensors):
            return False
        if any(t.device != tensors[0].device or t.layout != torch.strided for t in tensors):
            return False  # eager's own error is the right one
        device = tensors[0].device.type
        if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
            return False
        if any(t.is_floating_point() and t.dtype not in FUSABLE for t in tensors):
            return False
        return not any(t.is_complex() or t.is_quantized for t in tensors)

    def _has_epilogues(self, device: torch.device) -> bool:
        """Whether 16-bit products run on our Hopper kernel, which can add before it stores."""
        if self.options.rounding == "eager" or self.options.executor != "auto":
            return False
        return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)

    def _compile(
        self,
        flat: list[Any],
        spec: TreeSpec,
        places: list[int],
        modules: list[nn.Module],
        names: list[tuple[int, str]],
        tensors: list[torch.Tensor],
        own: int,
    ) -> Compiled:
        original = self.original

        def function(values: Sequence[torch.Tensor]) -> Any:
            leaves = list(flat)
            for place, value in zip(places, values[own:], strict=True):
                leaves[place] = value
            with ExitStack() as stack:
                for i, module in enumerate(modules):
                    mine = {n: v for (j, n), v in zip(names, values, strict=False) if j == i}
                    stack.enter_context(_reparametrize_module(module, mine, tie_weights=True))
                call_args, call_kwargs = tree_unflatten(leaves, spec)
                return original(*call_args, **call_kwargs)

        grad = torch.is_grad_enabled()
        plan = make_plan(
            function, tensors, [i < own for i in range(len(tensors))],
            [grad and t.requires_grad for t in tensors],
            original if isinstance(original, nn.Module) else None, self.options,
            dump.observer(self.options), self._has_epilogues(tensors[0].device),
        )  # fmt: skip
        device = tensors[0].device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return Compiled(plan, device, self.options)


_TRACING = threading.RLock()
_PLAIN = (bool, int, float, str)
MOST_RECENT = 1024


class _Slots:
    """Where a module's parameters and buffers are kept, so that they can be read without a walk."""

    def __init__(self, module: nn.Module) -> None:
        self._children = [
            (parent._modules, name, child)
            for parent in module.modules() for name, child in parent._modules.items()
        ]  # fmt: skip
        self._places: list[tuple[dict[str, Any], str]] = []
        modules = dict(module.named_modules(remove_duplicate=False))
        for store, named in (("_parameters", module.named_parameters()),
                             ("_buffers", module.named_buffers())):  # fmt: skip
            for path, _ in named:
                owner, _, name = path.rpartition(".")
                self._places.append((getattr(modules[owner], store), name))
        self.modules = list(module.modules())
        self._counts = [
            (store, len(store)) for m in module.modules() for store in (m._parameters, m._buffers)
        ]
        self._sizes = [(m._modules, len(m._modules)) for m in module.modules()]

    def current(self) -> bool:
        return (
            all(store.get(name) is child for store, name, child in self._children)
            and all(len(store) == n for store, n in self._counts)
            and all(len(store) == n for store, n in self._sizes)
            and all(store.get(name) is not None for store, name in self._places)
        )

    def tensors(self) -> list[torch.Tensor]:
        return [store[name] for store, name in self._places]


def _modes(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What each module's own state means for a trace: its mode and its hooks."""
    return tuple((m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _freeze(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return id(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)


def _leading(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Which inputs share the first one's leading extent: what capture treats as a batch."""
    sizes = [t.shape[0] if t.dim() else None for t in tensors]
    first = next((s for s in sizes if s is not None), None)
    return tuple(s == first for s in sizes)


def _fits(plan: Plan, tensors: Sequence[torch.Tensor]) -> bool:
    """Static extents agree (leading ones are not in the signature)."""
    for node, tensor in zip(plan.captured.graph.inputs, tensors, strict=False):
        for expected, actual in zip(node.shape, tensor.shape, strict=True):
            if isinstance(expected, int) and expected != actual:
                return False
    return True
