"""Which results of a step PyTorch's own operators do not repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafuse.tools.steps import Call, Target, run_step

DOCUMENTED = {
    "_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward", "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward",
    "embedding_dense_backward", "index_put", "index_add", "scatter_add", "scatter_reduce",
}  # fmt: skip
"""Operators that add with atomics on a GPU (attention apart, `torch.use_deterministic_algorithms`
lists them): on an idle device they may repeat many times all the same."""

TRIES = 3
"""Runs of an operator beside its own; adding in another order shows in one of them."""


def unrepeatable(target: Target, call: Call, upstream: Sequence[Tensor] | None) -> set[str]:
    """Names of the outputs and gradients that come from an operator which, run again on the same
    operands, gave other bits (attention's backward on a GPU, say).

    That a result itself repeats proves nothing: a sum over such values may round to the same
    number in some runs and not in others.
    """
    with _Tainted() as mode:
        results = run_step(target, call, upstream).named()
    return {n for n, t in results.items() if t is not None and _memory(t) in mode.memories}


class _Tainted(TorchDispatchMode):
    """Follows what depends on operators that do not repeat, by the memory it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {_memory(t) for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        written = {_memory(t) for t in _tensors(result)}
        if read & self.memories or not _repeats(func, args, kwargs, result):
            self.memories |= written
        else:  # memory that was freed and given out again starts clean
            self.memories -= written - read
        return result


def _repeats(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an operator gives the same numbers again; not asked of those that write to their
    operands, draw random numbers or leave memory as they find it."""
    name = func._schema.name.split("::")[-1].removesuffix("_")
    adds = name != "index_put" or (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    if name in DOCUMENTED and adds and any(t.is_cuda for t in _tensors((args, kwargs))):
        return False  # before its tags: some of attention's backwards are said to draw numbers
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    if "empty" in name:
        return True
    read = {_memory(t) for t in _tensors((args, kwargs))}
    first = [t for t in _tensors(result) if t.is_floating_point()]
    if all(_memory(t) in read for t in first):  # views
        return True
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for _ in range(TRIES)
        for a, b in zip(
            first, (t for t in _tensors(func(*args, **kwargs)) if t.is_floating_point()),
            strict=True,
        )
    )  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
