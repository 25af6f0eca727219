"""scaled_dot_product_attention, kept whole as the kernel that PyTorch itself would choose.

Traced on meta tensors it would open into products and a softmax over [length, length], which no GPU
should store. So it becomes one operator of our own, and one for its backward, over [batch, length,
heads, head] tensors: the order in which PyTorch's kernels keep results and in which models pack
q, k and v, so that nothing is copied on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
KINDS = {1: "flash", 2: "efficient", 3: "cudnn"}
"""PyTorch's numbers of its fused kernels (torch.nn.attention.SDPBackend)."""

_LIBRARY = torch.library.Library("megafuse", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str kind)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor seed, Tensor offset, bool causal, float? scale, str kind) -> (Tensor, Tensor, Tensor)"
)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [batch, length, heads, head] → (result like q, log-sum-exp float32, and the two
    states of a random generator that a kernel without dropout never reads)."""
    q, k, v = _heads_first(q, k, v)
    if kind == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        seed, offset = lse.new_empty((0,)), lse.new_empty((0,))
    elif kind == "efficient":
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    elif kind == "flash":
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2).contiguous(), lse, seed, offset


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, causal: bool, scale: float | None, kind: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad, q, k, v, out = _heads_first(grad, q, k, v, out)
    lengths = q.shape[2], k.shape[2]
    if kind == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif kind == "efficient":
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal,
            scale=scale,
        )[:3]  # fmt: skip
    elif kind == "flash":
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, offset, scale=scale
        )
    else:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, None, None, *lengths, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
    return dq, dk, dv


for _name, _function in (("attention", _attention), ("attention_backward", _attention_backward)):
    for _key in ("CPU", "CUDA", "Meta"):
        _LIBRARY.impl(_name, _function, _key)


class _Attention(torch.autograd.Function):
    """Ties the two operators together while tracing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        out, lse, seed, offset = torch.ops.megafuse.attention(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.how = how
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dq, dk, dv = torch.ops.megafuse.attention_backward(*grads, *ctx.saved_tensors, *ctx.how)
        return dq, dk, dv, None, None, None


_PYTORCHS = F.scaled_dot_product_attention


def is_attention(function: Callable[..., Any]) -> bool:
    return function is _PYTORCHS


@contextmanager
def kept_whole(device: torch.device) -> Iterator[None]:
    """While tracing a call that will run on `device`, attention inside PyTorch's own modules is
    kept whole too: a function mode sees `multi_head_attention_forward`, not what it calls. Other
    threads' tensors are not fake and get PyTorch's function."""

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = None
        if isinstance(query, FakeTensor):
            out = whole_attention(device, query, *args, **kwargs)
        return _PYTORCHS(query, *args, **kwargs) if out is None else out

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _PYTORCHS


def whole_attention(
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`F.scaled_dot_product_attention` for tracing a call that will run on `device`; None for a
    form that is left to open (masks, dropout, grouped heads, odd head sizes)."""
    if attn_mask is not None or dropout_p != 0.0 or enable_gqa or q.dim() != 4:
        return None
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == k.shape[3] == v.shape[3]):
        return None
    kind = _kind(device, q, k, v, is_causal, scale)
    if kind is None:
        return None
    out = _Attention.apply(*_heads_first(q, k, v), is_causal, scale, kind)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def _kind(
    device: torch.device, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> str | None:
    """The kernel PyTorch would run on `device`, asked with a batch of one; None for none."""
    if any(not isinstance(n, int) for t in (q, k) for n in t.shape[1:]) or q.shape[3] % 8:
        return None  # a head of another size is padded
    if device.type == "meta":  # a plan for a GPU that is not here
        return "flash" if q.dtype.itemsize == 2 else "efficient"
    if device.type not in ("cpu", "cuda"):
        return None
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        like = [torch.empty((1, *t.shape[1:]), dtype=t.dtype, device=device) for t in (q, k, v)]
        choice = int(aten._fused_sdp_choice(*like, None, 0.0, causal, scale=scale))
    kind = KINDS.get(choice)
    return "cpu" if device.type == "cpu" and kind == "flash" else kind
