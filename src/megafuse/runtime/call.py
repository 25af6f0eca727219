"""One call of a plan under autograd: runs forward, holds what backward reads, runs backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megafuse.compiler import Plan
from megafuse.config import Options
from megafuse.errors import DoubleBackwardError
from megafuse.layouts import from_memory, to_memory
from megafuse.runtime.arena import Piece, as_tensor
from megafuse.runtime.executor import Executor, Progress
from megafuse.runtime.reference import interpret

Values = list[torch.Tensor]


@dataclass
class Compiled:
    """A plan with an executor for each direction, made on first use."""

    plan: Plan
    device: torch.device
    options: Options
    forward: Executor | None = None
    backward: Executor | None = None
    _views: Any = field(default=None, repr=False)

    def build(self, progress: Progress | None = None) -> None:
        if self.options.executor == "reference":
            return
        if self.forward is None:
            public = self.plan.captured.outputs
            self.forward = Executor(self.plan.forward, self.device, self.options, progress, public)
        if self.backward is None and self.plan.backward is not None:
            self.backward = Executor(self.plan.backward, self.device, self.options, progress)

    def run_forward(
        self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]
    ) -> tuple[Values, list[Any], Values]:
        """The call's own outputs, the values kept for backward (pieces among them), and the tensors
        as they were read.

        Buffers that the call writes have their new values on return.
        """
        plan = self.plan
        plain = [_plain(t) for t in tensors]
        if self.options.executor == "reference":
            results = interpret(plan.split.forward)(*plain)
        else:
            if self.forward is None:
                self.build()
            assert self.forward is not None
            with _current(self.device):
                results = self.forward.run(list(plain), sizes)
        captured = plan.captured
        outputs, kept = results[: captured.outputs], results[captured.outputs :]
        for i in plan.copied:
            outputs[i] = outputs[i].clone()
        own = captured.outputs - len(captured.written)
        for index, value in zip(captured.written, outputs[own:], strict=True):
            if index in plan.reads:
                plain[index] = plain[index].clone()
            tensors[index].copy_(value)
        layouts = captured.layouts.orders
        laid = [from_memory(o, order) for o, order in zip(outputs[:own], layouts, strict=True)]
        return _distinct(captured.layouts.separated(laid)), kept, plain

    def run_backward(self, tensors: list[Any], sizes: tuple[int, ...]) -> list[Any]:
        """Gradients of the flat tensors. tensors: those backward reads (None for the others), the
        kept values, and the upstream gradients as they lie in memory; the list is emptied."""
        assert self.plan.split.backward is not None
        if self.options.executor == "reference":
            results = interpret(self.plan.split.backward)(*tensors)
        else:
            if self.backward is None:
                self.build()
            assert self.backward is not None
            with _current(self.device):
                results = self.backward.run(tensors, sizes)
        orders = self.plan.captured.layouts.gradients
        return [None if g is None else from_memory(g, o) for g, o in zip(results, orders)]

    def reads(self) -> Sequence[int]:
        """Positions of the flat tensors to hold for backward. The reference executor takes the
        run-time sizes from the tensors themselves, so it needs all of them."""
        if self.options.executor == "reference":
            return range(len(self.plan.sources))
        return self.plan.reads

    def views(self, tensors: Sequence[torch.Tensor]) -> Values:
        """The outputs that are an input's own memory, by PyTorch's own view operators."""
        captured = self.plan.captured
        if captured.views is None:
            return []
        if self._views is None:
            self._views = interpret(captured.views)
        found = self._views(*tensors)
        return [
            v.detach() if alone and v.requires_grad else v
            for v, alone in zip(found, captured.detached, strict=True)
        ]


def _distinct(tensors: Values) -> Values:
    """Tensors that autograd takes for results of its own: one object each (a value returned twice,
    once detached, is two), and no views, which must not be written in place."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        result.append(tensor.detach() if id(tensor) in seen or tensor._is_view() else tensor)
        seen.add(id(tensor))
    return result


def _is_batched(tensor: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as kernels read it: contiguous and 16-byte aligned; itself if it is that already."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    if tensor.data_ptr() % 16:
        return tensor.clone()
    return tensor


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched in the context of their own device, whichever the caller's is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _hooks_on_saved() -> bool:
    """Whether the caller asked autograd to transform what is saved for backward."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


class Call(torch.autograd.Function):
    """`apply(compiled, sizes, *tensors)`: the call's own outputs, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, sizes: tuple[int, ...], *tensors: torch.Tensor
    ) -> Any:
        outputs, kept, plain = compiled.run_forward(tensors, sizes)
        ctx.compiled, ctx.sizes = compiled, sizes
        ctx.set_materialize_grads(False)
        # Values only this call knows are held here rather than by autograd, so that backward can
        # drop each after its last use. Autograd holds what the caller can reach: it notices when
        # that was written in the meantime; and hooks on saved tensors (checkpointing, offloading)
        # see everything.
        if _hooks_on_saved():
            kept = [as_tensor(k) for k in kept]
            watched = set(range(len(kept)))
        else:
            public = {o.untyped_storage()._cdata for o in outputs}
            watched = {
                i for i, k in enumerate(kept)
                if type(k) is not Piece and k.untyped_storage()._cdata in public
            }  # fmt: skip
        ctx.kept = [None if i in watched else k for i, k in enumerate(kept)]
        ctx.watched = sorted(watched)
        ctx.save_for_backward(
            *(plain[i] for i in compiled.reads()), *(kept[i].detach() for i in ctx.watched)
        )
        differentiable = compiled.plan.captured.differentiable
        fixed = [o for i, o in enumerate(outputs) if i not in differentiable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        compiled: Compiled = ctx.compiled
        captured = compiled.plan.captured
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
        for k, i in enumerate(captured.differentiable):
            grad = grads[i]
            if grad is None:
                absent.add(k)
                shape, dtype, device = ctx.like[i]
                grad = torch.zeros(shape, dtype=dtype, device=device)
            upstream.append(_plain(to_memory(grad, captured.layouts.orders[i])))
        saved = list(ctx.saved_tensors)
        tensors: list[Any] = [None] * len(compiled.plan.sources)
        for i, tensor in zip(compiled.reads(), saved, strict=False):
            tensors[i] = tensor
        kept = list(ctx.kept)
        for i, tensor in zip(ctx.watched, saved[len(compiled.reads()) :], strict=True):
            kept[i] = tensor
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.kept = None
        tensors += [*kept, *upstream]
        del upstream, saved, kept, grad
        results = compiled.run_backward(tensors, ctx.sizes)
        if absent:  # what only an unused output leads to has no gradient, rather than a zero one
            sources = compiled.plan.sources
            results = [None if s <= absent else r for r, s in zip(results, sources, strict=True)]
        return (None, None, *results)
