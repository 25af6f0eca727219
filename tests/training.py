"""Small models that train, and their loss curves: eager from five starts, and compiled.

The starts differ by one unit in the last place; a sixth run that differs from eager by rounding
alone stays as near the five as those are to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 50
Batch = tuple[Tensor, ...]


class Layer(nn.Module):
    """Causal attention and a GELU MLP, each behind a LayerNorm, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Next-token loss of tokens [B, T]."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4, length: int = 12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = self.tokens(tokens[:, :-1]) + self.places(at)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        """Sequences that step through the vocabulary at a speed of their own, with noise."""
        start, speed = torch.randint(50, (2, 8, 1), generator=generator)
        noise = torch.randint(3, (8, 13), generator=generator)
        return (((start + (1 + speed % 5) * torch.arange(13) + noise) % 50),)


class Recommender(nn.Module):
    """In the manner of DLRM: bags of embeddings and a bottom MLP meet in products of pairs, a top
    MLP scores them; binary cross entropy of dense [B, 13], indices [B, bags, 4], labels [B]."""

    def __init__(self, bags: int = 3, rows: int = 40, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = torch.tril_indices(bags + 1, bags + 1, -1)
        self.register_buffer("pairs", pairs[0] * (bags + 1) + pairs[1])
        self.top = nn.Sequential(nn.Linear(width + pairs.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(indices[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        scores = self.top(torch.cat([x, products[:, self.pairs]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, labels)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        dense = torch.randn(64, 13, generator=generator)
        indices = torch.randint(40, (64, 3, 4), generator=generator)
        labels = (dense[:, 0] + (indices[:, 0, 0] % 2) > 0.5).float()
        return dense, indices, labels


def losses(
    model: nn.Module, step: Callable[..., Tensor], device: str = "cpu", steps: int = STEPS
) -> Tensor:
    """The loss of each of `steps` steps of AdamW on fresh batches; `step` is `model`, perhaps
    compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(*(t.to(device) for t in model.batch(generator)))
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).cpu()


def made(kind: type[nn.Module], nudge: int | None = None, device: str = "cpu") -> nn.Module:
    """A seeded model; with `nudge`, every weight moved by one unit in the last place, up or down
    as a generator of that seed says."""
    torch.manual_seed(0)
    model = kind()
    if nudge is not None:
        generator = torch.Generator().manual_seed(100 + nudge)
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool()
            towards = torch.where(up, torch.inf, -torch.inf)
            parameter.data = torch.nextafter(parameter.data, towards)
    return model.to(device)


def assert_inside_spread(curve: Tensor, eager: Tensor) -> None:
    """curve: [steps]; eager: [runs, steps]. At every step the curve is no farther from the middle
    of the eager runs than those have been from each other so far, or than float32 tells apart."""
    middle = eager.mean(0)
    spread = (eager.amax(0) - eager.amin(0)).cummax(0).values
    resolution = 4 * torch.finfo(torch.float32).eps * middle.abs()
    distance = (curve - middle).abs()
    worst = (distance / torch.maximum(spread, resolution)).max().item()
    assert worst <= 1, f"{worst:.2f} times the spread of the eager runs"


def compare(kind: type[nn.Module], backend: Any, device: str = "cpu") -> None:
    """Train eager five times and compiled once; the losses must fall, and agree."""
    runs = [made(kind, nudge, device) for nudge in range(5)]
    eager = torch.stack([losses(m, m, device) for m in runs])
    model = made(kind, device=device)
    curve = losses(model, torch.compile(model, backend=backend), device)
    assert curve[-5:].mean() < 0.8 * curve[0]
    assert_inside_spread(curve, eager)
