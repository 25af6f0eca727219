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
_LIBRARY.define(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale,"
    " bool grouped) -> Tensor"
)
_LIBRARY.define(
    "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask,"
    " bool causal, float? scale, bool grouped) -> (Tensor, Tensor, Tensor)"
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


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    grouped: bool,
) -> Tensor:  # fmt: skip
    """Forms whose kernels want their masks padded or their heads repeated: PyTorch's own front end
    does that. Layouts as above; `grouped`: several heads of q share one of k and v."""
    q, k, v = _heads_first(q, k, v)
    more = {"enable_gqa": True} if grouped else {}
    out = _PYTORCHS(q, k, v, mask, 0.0, causal, scale=scale, **more)
    return out.transpose(1, 2).contiguous()


def _masked_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward is run again: its kernels keep a row statistic that the front end does not hand
    out, and that costs less than a [length, length] tensor would."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        grads = torch.autograd.grad(_masked_attention(q, k, v, *how), (q, k, v), grad)
    dq, dk, dv = (g.contiguous() for g in grads)
    return dq, dk, dv


def _like_q(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _like_all(grad: Tensor, *qkv: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in qkv[:3])
    return dq, dk, dv


_PYTORCHS = F.scaled_dot_product_attention
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _attention),
    "attention_backward": (_attention_backward, _attention_backward),
    "masked_attention": (_masked_attention, _like_q),
    "masked_attention_backward": (_masked_attention_backward, _like_all),
}
for _name, (_real, _shapes) in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)
    _LIBRARY.impl(_name, _shapes, "Meta")


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


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(q, k, v, how[0])
        ctx.how = how[1:]
        return torch.ops.megafuse.masked_attention(q, k, v, *how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        operands = *grads, *ctx.saved_tensors, *ctx.how
        dq, dk, dv = torch.ops.megafuse.masked_attention_backward(*operands)
        return dq, dk, dv, None, None, None, None


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`F.scaled_dot_product_attention` for tracing a call that will run on `device`; None where it
    is to open: with dropout or a trained mask, or where PyTorch itself has no kernel for it."""
    q, k, v = query, key, value
    if dropout_p != 0.0 or q.dim() != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        return None
    if attn_mask is not None and attn_mask.requires_grad:
        return None
    kind = _kind(device, q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if kind is None:
        return None
    heads = q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0
    if attn_mask is None and heads:
        out = _Attention.apply(*_heads_first(q, k, v), is_causal, scale, kind)
    else:
        how = (attn_mask, is_causal, scale, enable_gqa)
        out = _MaskedAttention.apply(*_heads_first(q, k, v), *how)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def _kind(
    device: torch.device, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
    scale: float | None, grouped: bool,
) -> str | None:  # fmt: skip
    """The kernel PyTorch would run on `device`, asked with a batch of one; None for none."""
    given = [q, k, v] if mask is None else [q, k, v, mask]
    if any(not isinstance(n, int) for t in (q, k, v) for n in t.shape[1:]):
        return None
    if device.type == "meta":  # a plan for a GPU that is not here
        return "flash" if q.dtype.itemsize == 2 else "efficient"
    if device.type not in ("cpu", "cuda"):
        return None
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        shapes = [[n if isinstance(n, int) else 1 for n in t.shape] for t in given]
        for shape, t in zip(shapes, given, strict=True):
            shape[: t.dim() - 3] = [1] * (t.dim() - 3)
        like = [torch.empty(s, dtype=t.dtype, device=device)
                for s, t in zip(shapes, given, strict=True)]  # fmt: skip
        bias = like[3] if mask is not None else None
        more = {"enable_gqa": True} if grouped else {}
        choice = int(aten._fused_sdp_choice(*like[:3], bias, 0.0, causal, scale=scale, **more))
    kind = KINDS.get(choice)
    return "cpu" if device.type == "cpu" and kind == "flash" else kind
