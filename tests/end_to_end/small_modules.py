"""Small modules of many kinds, each with inputs at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Of(nn.Module):
    """A function with named submodules and parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def mlp(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.norm(m.up(x)))) + x


def attention_weights(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2) * 0.25
    return torch.softmax(scores.masked_fill(mask, -1e9), -1)


def rms_norm(m: Any, x: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * m.weight).to(x.dtype)


def activations(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(x, approximate="tanh"), torch.tanh(x) * F.relu(x), F.leaky_relu(x, 0.1),
            F.softplus(x) + F.elu(x), F.hardswish(x) * torch.sigmoid(x))  # fmt: skip


def residual(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = x + y
    return m.norm(h), h


def group_norm(m: Any, x: Tensor) -> Tensor:
    b = x.shape[0]
    g = x.reshape(b, 3, -1)
    var, mean = torch.var_mean(g, -1, correction=0, keepdim=True)
    h = ((g - mean) * torch.rsqrt(var + 1e-5)).reshape(x.shape)
    return h * m.weight.reshape(1, -1, 1) + m.bias.reshape(1, -1, 1)


def column_sums(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * x).sum(0), torch.sigmoid(x).sum((0, 1))


def cat_split_stack(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = torch.cat([x, y * 2], dim=-1).split([3, 5, 10], dim=-1)
    both = torch.stack([a * a, b[..., :3], c[..., 1::4]], dim=1)
    return both, torch.cat([c, torch.tanh(a)], -1)


def transposed(m: Any, x: Tensor) -> Tensor:
    h = torch.softmax(x.transpose(1, 2), -1).permute(2, 0, 1) * m.scale
    return h + x.permute(1, 0, 2).flip(-1) if m.flip else h


def scalar_loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.lin(x), y) + m.lin.weight.abs().mean()


def cross_entropy(m: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.lin(x), labels)


def embedding(m: Any, index: Tensor) -> Tensor:
    return m.norm(m.table(index) * 3.0)


def gated(m: Any, x: Tensor) -> Tensor:
    a, b = m.lin(x).chunk(2, -1)
    return F.silu(a) * b


def max_pool(m: Any, x: Tensor) -> Tensor:
    return x.amax(1) - x.amin(-1, keepdim=True)[:, 0] + x.mean((1, 2), keepdim=True)[:, 0]


def along_the_batch(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x.sum(1) * 2, (x - x.mean(0, keepdim=True)).exp(), x.t() * 3)


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(7)
    norm.running_mean = torch.randn(7)
    norm.running_var = torch.rand(7) + 0.5
    nn.init.normal_(norm.weight)
    return norm.eval()


Example = tuple[nn.Module, list[Tensor]]


def _norm(n: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(n)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias)
    return norm


def _r(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


CASES: dict[str, Callable[[], Example]] = {
    "mlp": lambda: (Of(mlp, up=nn.Linear(7, 19), norm=_norm(19), down=nn.Linear(19, 7)),
                    [_r(5, 3, 7)]),
    "softmax": lambda: (Of(attention_weights), [_r(3, 5, 4), torch.rand(3, 5, 5) > 0.7]),
    "rms_norm": lambda: (Of(rms_norm, weight=torch.rand(13)), [_r(6, 2, 13)]),
    "activations": lambda: (Of(activations), [_r(3, 37)]),
    "residual": lambda: (Of(residual, norm=_norm(33)), [_r(5, 33), _r(5, 33)]),
    "group_norm": lambda: (Of(group_norm, weight=torch.randn(6), bias=torch.randn(6)),
                           [_r(4, 6, 5)]),
    "column_sums": lambda: (Of(column_sums), [_r(50, 3, 17)]),
    "cat_split_stack": lambda: (Of(cat_split_stack), [_r(5, 9), _r(5, 9)]),
    "transposed": lambda: (Of(transposed, scale=torch.randn(5), flip=False), [_r(4, 6, 5)]),
    "scalar_loss": lambda: (Of(scalar_loss, lin=nn.Linear(6, 3)), [_r(5, 6), _r(5, 3)]),
    "cross_entropy": lambda: (Of(cross_entropy, lin=nn.Linear(6, 11)),
                              [_r(5, 6), torch.tensor([0, 10, 3, 3, 7])]),
    "embedding": lambda: (Of(embedding, table=nn.Embedding(10, 8), norm=_norm(8)),
                          [torch.tensor([[1, 2, 9], [1, 1, 0]])]),
    "batch_norm": lambda: (batch_norm(), [_r(5, 7)]),
    "gated": lambda: (Of(gated, lin=nn.Linear(5, 18)), [_r(4, 5)]),
    "max_pool": lambda: (Of(max_pool), [_r(3, 5, 7)]),
    "along_the_batch": lambda: (Of(along_the_batch), [_r(6, 5)]),
    "long_row": lambda: (_norm(20_001), [_r(2, 20_001)]),
    "one_column": lambda: (Of(residual, norm=nn.Identity()), [_r(5, 1), _r(5, 1)]),
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Example:
    """The module and its inputs, seeded; floating-point tensors in `dtype`."""
    torch.manual_seed(seed)
    module, args = CASES[name]()
    args = [
        a.detach().to(dtype).requires_grad_(a.requires_grad) if a.is_floating_point() else a
        for a in args
    ]
    return module.to(dtype), args
