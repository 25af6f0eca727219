"""Calls that go wrong, or only look as if they might: the first table of docs/errors.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from error_rows import row
from torch import Tensor, nn

import megafuse
from megafuse import Options

Fuse = Callable[[Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(12)
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Strict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError(f"two dimensions, please, not {x.dim()}")
        return x * 2


def sample(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


@row("a tensor of the wrong shape")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 13))


@row("a float64 tensor beside float32 parameters")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 12).double())


@row("a float16 tensor beside float32 parameters")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 12).half())


@row("integers where a module needs floating point")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(torch.ones(5, 12, dtype=torch.int64))


@row("integers to a function of them")
def _(fuse: Fuse) -> Any:
    whole = torch.arange(12).reshape(3, 4)
    return fuse(lambda a, b: (a * b + 1) // 3)(whole, whole.int())


@row("complex numbers to a function of them")
def _(fuse: Fuse) -> Any:
    return fuse(lambda a, b: a * b + 1)(torch.complex(sample(4, 3), sample(4, 3)), sample(4, 3))


@row("complex numbers where a module needs real ones")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(torch.ones(5, 12, dtype=torch.complex64))


@row("tensors on two devices")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 12).to("meta"))


@row("a module and tensors on the meta device")
def _(fuse: Fuse) -> Any:
    result = fuse(Net().to("meta"))(sample(5, 12).to("meta"))
    return result.shape, result.dtype, result.device


@row("a batch of no samples")
def _(fuse: Fuse) -> Any:
    net, x = Net(), torch.empty(0, 12, requires_grad=True)
    result = fuse(net)(x)
    result.sum().backward()
    return result, x.grad, [p.grad for p in net.parameters()]


@row("a sparse tensor")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(torch.eye(12).to_sparse())


@row("no tensor at all")
def _(fuse: Fuse) -> Any:
    return fuse(lambda a: a + 1)(3)


@row("an argument too few")
def _(fuse: Fuse) -> Any:
    return fuse(Net())()


@row("an unknown keyword")
def _(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 12), scale=2)


@row("a module whose own check fails")
def _(fuse: Fuse) -> Any:
    return fuse(Strict())(sample(5, 3, 4))


@row("control flow that depends on tensor values")
def _(fuse: Fuse) -> Any:
    return fuse(lambda x: x if x.sum() > 0 else -x)(sample(5, 12))


@row("a number taken out of a tensor")
def _(fuse: Fuse) -> Any:
    return fuse(lambda x: x * x.max().item())(sample(5, 12))


@row("a mask that decides a size")
def _(fuse: Fuse) -> Any:
    return fuse(lambda x: x[x > 0] * 2)(sample(5, 12))


@row("code that writes to an input")
def _(fuse: Fuse) -> Any:
    return fuse(lambda x: x.add_(1) * 2)(sample(5, 12))


@row("code that writes to an input that requires grad")
def _(fuse: Fuse) -> Any:
    return fuse(lambda x: x.mul_(2).sum())(sample(5, 12).requires_grad_())


@row("a tensor that is neither parameter, buffer nor argument")
def _(fuse: Fuse) -> Any:
    outside = sample(12)
    return fuse(lambda x: x + outside)(sample(5, 12))


@row("gradients of gradients")
def _(fuse: Fuse) -> Any:
    x = sample(5, 12).requires_grad_()
    (first,) = torch.autograd.grad(fuse(Net())(x).sum(), x, create_graph=True)
    return first.sum().backward()


@row("several upstream gradients at once")
def _(fuse: Fuse) -> Any:
    x = sample(5, 12).requires_grad_()
    return torch.autograd.grad(fuse(Net())(x), x, torch.ones(2, 5, 12), is_grads_batched=True)


@row("vmap")
def _(fuse: Fuse) -> Any:
    return torch.func.vmap(fuse(Net()))(sample(3, 5, 12))


@row("jvp")
def _(fuse: Fuse) -> Any:
    return torch.func.jvp(fuse(Net()), (sample(5, 12),), (sample(5, 12) + 1,))


@row("torch.func.grad")
def _(fuse: Fuse) -> Any:
    fused = fuse(Net())
    return torch.func.grad(lambda x: fused(x).square().sum())(sample(5, 12))


@row("a Jacobian by torch.func")
def _(fuse: Fuse) -> Any:
    fused = fuse(Net())
    return torch.func.jacrev(fused)(sample(2, 12)), torch.func.jacfwd(fused)(sample(2, 12))


@row("forward-mode differentiation")
def _(fuse: Fuse) -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(sample(5, 12), sample(5, 12) + 1)
        return forward_ad.unpack_dual(fuse(Net())(dual)).tangent


@row("a tracer around the fused module")
def _(fuse: Fuse) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    fused, x = fuse(Net()), sample(5, 12)
    return make_fx(lambda x: fused(x))(x)(x + 1)


@row("neither module nor function")
def _() -> Any:
    return megafuse.fuse(3)  # type: ignore[arg-type]


@row("more rows in one call than kernels count (2^31 - 2^24)")
def _() -> Any:
    with mock.patch("megafuse.codegen.schedule.MOST_ROWS", 4):
        return megafuse.fuse(lambda x: x.softmax(-1))(torch.zeros(5, 12))


@row("explain before any call")
def _() -> Any:
    return megafuse.explain(megafuse.fuse(Net()))


@row("explain of a call that the original serves")
def _() -> Any:
    return megafuse.explain(megafuse.fuse(Net()), torch.empty(0, 12))


@row("a check in float64")
def _() -> Any:
    return megafuse.check(Net().double(), Net().double(), sample(5, 12).double())


@row("an option's value that does not exist")
def _() -> Any:
    return Options(rounding="fast")  # type: ignore[arg-type]


@row("less than no fuel")
def _() -> Any:
    return Options(fuel=-1)
