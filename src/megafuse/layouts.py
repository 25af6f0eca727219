"""How eager lays out what a call returns: found by running the code once on tensors without data.

Generated code computes on contiguous tensors; a permutation of extents at the edge of the graph is
addressing there. So it is enough to know, for each output and gradient, the order in which eager
keeps its extents in memory, and which outputs are an input's own memory seen in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megafuse.errors import UnsupportedError
from megafuse.provenance import without_logs

Order = tuple[int, ...] | None
"""Extents of a tensor as they lie in memory, outermost first; None where they lie as written."""

Strides = tuple[Order, tuple[int, ...]] | None
"""What of an input's strides decides eager's layouts: the order of its extents, and those that are
expanded (stride 0). None for a contiguous tensor."""


@dataclass(frozen=True)
class Layouts:
    """Of one call, for upstream gradients that are laid out as the outputs.

    outputs: order of each output tensor. views: whether it shares memory with an input. memories:
    equal for outputs that share memory with each other. gradients: order of the gradient of each
    flat tensor.
    """

    outputs: tuple[Order, ...]
    views: tuple[bool, ...]
    gradients: tuple[Order, ...]
    memories: tuple[int, ...]

    @property
    def orders(self) -> tuple[Order, ...]:
        """Orders of the outputs that are memory of their own."""
        return tuple(o for o, view in zip(self.outputs, self.views, strict=True) if not view)

    def separated(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that are memory of their own, apart where eager's are: two equal expressions
        are one value here, and writing to one result must not change the other."""
        memories = [m for m, view in zip(self.memories, self.views, strict=True) if not view]
        owner: dict[int, int] = {}
        result = []
        for tensor, memory in zip(own, memories, strict=True):
            if owner.setdefault(tensor.untyped_storage()._cdata, memory) != memory:
                tensor = tensor.clone()
            result.append(tensor)
        return result


def contiguous(outputs: int, tensors: int) -> Layouts:
    """Layouts of a call about which nothing is known."""
    return Layouts((None,) * outputs, (False,) * outputs, (None,) * tensors, tuple(range(outputs)))


def strides_of(tensor: torch.Tensor) -> Strides:
    if tensor.is_contiguous():
        return None
    expanded = tuple(
        d for d, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if stride == 0 and extent > 1
    )  # fmt: skip
    return order_of(tensor), expanded


def order_of(tensor: torch.Tensor) -> Order:
    """The order in which a new tensor like `tensor` keeps its extents (`torch.empty_like`)."""
    like = torch.empty_like(tensor, device="meta")
    if like.is_contiguous():
        return None
    strides = like.stride()
    return tuple(sorted(range(like.dim()), key=lambda d: -strides[d]))


def inverse(order: Order) -> tuple[int, ...]:
    assert order is not None
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def to_memory(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """`tensor` with its extents in the order they have in memory."""
    return tensor if order is None else tensor.permute(order)


def from_memory(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """What `to_memory` undoes."""
    return tensor if order is None else tensor.permute(inverse(order))


def probe(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    needs_grad: Sequence[bool],
    batched: Sequence[bool],
) -> Layouts | None:
    """Run `function(tensors)` and its gradients on tensors without data, laid out as the given
    ones; None where the code does not run that way.

    needs_grad: which tensors get a gradient. batched: which have a leading extent that may change
    from call to call; it counts as 2 or more, so that an extent of 1 hides no order.
    Raises UnsupportedError as `function` does.
    """
    strides = [strides_of(t) for t in tensors]
    with without_logs(), FakeTensorMode(), torch.enable_grad():
        primals = [
            _like(t, laid, lead).requires_grad_(wants)
            for t, laid, wants, lead in zip(tensors, strides, needs_grad, batched, strict=True)
        ]
        try:
            outputs = [v for v in tree_leaves(function(primals)) if isinstance(v, torch.Tensor)]
            grads = _gradients(outputs, [p for p in primals if p.requires_grad])
        except UnsupportedError:
            raise
        except Exception:
            return None  # capture meets the same fault, and says what it means
        owned = {p.untyped_storage()._cdata for p in primals}
        views = tuple(o.untyped_storage()._cdata in owned for o in outputs)
        storages = [o.untyped_storage()._cdata for o in outputs]
        memories = tuple(map(storages.index, storages))
        found = iter(grads)
        gradients = [next(found, None) if wants else None for wants in needs_grad]
        return Layouts(
            tuple(map(order_of, outputs)), views,
            tuple(None if g is None else order_of(g) for g in gradients), memories,
        )  # fmt: skip


def _like(tensor: torch.Tensor, strides: Strides, batched: bool) -> torch.Tensor:
    """A tensor without data, dense but for its expanded extents."""
    shape = list(tensor.shape)
    if batched:
        shape[0] = max(2, shape[0])
    if strides is None:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    order, expanded = strides
    order = order or tuple(range(len(shape)))
    stored = [1 if d in expanded else shape[d] for d in order]
    whole = torch.empty(stored, dtype=tensor.dtype, device="meta")
    return from_memory(whole, order).expand(shape).detach()


def _gradients(
    outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    roots = [o for o in outputs if o.requires_grad]
    if not roots or not wanted:
        return [None] * len(wanted)
    upstream = [torch.empty_like(o) for o in roots]
    return torch.autograd.grad(roots, wanted, upstream, allow_unused=True)
