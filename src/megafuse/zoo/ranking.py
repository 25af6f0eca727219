"""Ranking and recommendation: cross networks, towers, and token mixers by different hands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.zoo.entry import Entry, Example, RMSNorm, Size, normal, randomised


class DCNv2(Entry, name="dcn_v2"):
    """Deep & Cross Network v2: a stack of full-rank cross layers."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x

    @staticmethod
    def case(size: Size) -> Example:
        b, d = (133, 72) if size == "cpu" else (32_768, 1024)
        return DCNv2(d, 3), (normal(b, d),)


class DLRMTop(Entry, name="dlrm_top"):
    """DLRM's pairwise interaction of embeddings and its top MLP with a binary loss."""

    def __init__(self, features: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(features * features + dim, hidden)
        self.second = nn.Linear(hidden, hidden // 2)
        self.third = nn.Linear(hidden // 2, 1)

    def forward(self, dense: Tensor, sparse: Tensor, label: Tensor) -> Tensor:
        features = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        dots = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        h = F.relu(self.first(torch.cat([dense, dots], dim=1)))
        logit = self.third(F.relu(self.second(h))).squeeze(1)
        return F.binary_cross_entropy_with_logits(logit, label)

    @staticmethod
    def case(size: Size) -> Example:
        b, f, d, h = (129, 7, 32, 96) if size == "cpu" else (32_768, 27, 128, 1024)
        label = (torch.rand(b) < 0.3).to(torch.get_default_dtype())
        return DLRMTop(f, d, h), (normal(b, d), normal(b, f - 1, d), label)


class TallColumns(Entry, name="tall_columns"):
    """Standardising 8 features over very many rows: column means and variances, then a scale."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=0)
        variance = centred.square().mean(dim=0)
        return centred * torch.rsqrt(variance + 1e-5) * self.weight + self.bias

    @staticmethod
    def case(size: Size) -> Example:
        n = 2_003 if size == "cpu" else 6_400_000
        return randomised(TallColumns(8)), (normal(n, 8),)


def mix_tokens(x: Tensor, heads: int) -> Tensor:
    """Every head of every token gathered by head: [b, t, d] to [b, heads, t * d / heads]."""
    b, t, d = x.shape
    return x.view(b, t, heads, d // heads).transpose(1, 2).reshape(b, heads, t * d // heads)


class EinsumMixer(Entry, name="mixer_einsum_gelu"):
    """Token mixing and a per-token GELU FFN by einsum, post-norm."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(tokens, dim, hidden) / dim**0.5)
        self.b1 = nn.Parameter(torch.randn(tokens, hidden) * 0.1)
        self.w2 = nn.Parameter(torch.randn(tokens, hidden, dim) / hidden**0.5)
        self.b2 = nn.Parameter(torch.randn(tokens, dim) * 0.1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x + mix_tokens(x, x.shape[1]))
        f = F.gelu(torch.einsum("btd,tdh->bth", h, self.w1) + self.b1)
        return self.norm2(h + torch.einsum("bth,thd->btd", f, self.w2) + self.b2)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (21, 8, 64, 96) if size == "cpu" else (1024, 32, 768, 1536)
        return randomised(EinsumMixer(t, d, h)), (normal(b, t, d),)


class ModuleListMixer(Entry, name="mixer_module_list"):
    """Per-token MLPs as a ModuleList applied one by one and stacked."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(dim, hidden) for _ in range(tokens))
        self.down = nn.ModuleList(nn.Linear(hidden, dim) for _ in range(tokens))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x + mix_tokens(x, x.shape[1]))
        rows = [down(F.gelu(up(z)))
                for up, down, z in zip(self.up, self.down, h.unbind(1), strict=True)]  # fmt: skip
        return self.norm2(h + torch.stack(rows, dim=1))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (33, 4, 64, 88) if size == "cpu" else (4096, 16, 512, 1024)
        return randomised(ModuleListMixer(t, d, h)), (normal(b, t, d),)


class HeadsMixer(Entry, name="mixer_heads"):
    """Token mixing with fewer heads than tokens, so that mixed tokens are wider; SwiGLU experts."""

    def __init__(self, tokens: int, heads: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.heads, wide = heads, tokens * dim // heads
        self.up = nn.Parameter(torch.randn(heads, wide, 2 * hidden) / wide**0.5)
        self.down = nn.Parameter(torch.randn(heads, hidden, wide) / hidden**0.5)
        self.norm = nn.LayerNorm(wide)

    def forward(self, x: Tensor) -> Tensor:
        mixed = mix_tokens(x, self.heads)
        h = self.norm(mixed).transpose(0, 1)
        value, gate = torch.bmm(h, self.up).chunk(2, dim=-1)
        return mixed + torch.bmm(value * F.silu(gate), self.down).transpose(0, 1)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, n, d, h = (21, 8, 4, 64, 72) if size == "cpu" else (2048, 32, 16, 512, 1024)
        return randomised(HeadsMixer(t, n, d, h)), (normal(b, t, d),)


class PreNormMixer(Entry, name="mixer_pre_norm"):
    """Pre-norm mixing and a shared FFN, residuals left unnormalised."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + mix_tokens(self.norm1(x), x.shape[1])
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (21, 8, 64, 104) if size == "cpu" else (512, 64, 768, 1536)
        return randomised(PreNormMixer(d, h)), (normal(b, t, d),)


class RMSNormMixer(Entry, name="mixer_rms_norm"):
    """Mixing with RMSNorm and packed SwiGLU weights for each token."""

    def __init__(self, tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(tokens, dim, 2, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(tokens, hidden, dim) / hidden**0.5)
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = x + mix_tokens(self.norm1(x), x.shape[1])
        packed = torch.einsum("btd,tdgh->btgh", self.norm2(h), self.up)
        value, gate = packed.unbind(2)
        return h + torch.einsum("bth,thd->btd", value * F.silu(gate), self.down)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (21, 8, 64, 88) if size == "cpu" else (1024, 32, 768, 1024)
        return randomised(RMSNormMixer(t, d, h)), (normal(b, t, d),)


class SoftMoE(Entry, name="moe_dense_relu"):
    """A dense mixture of ReLU experts for each token under a softmax router."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), dim=-1)
        h = F.relu(torch.einsum("bd,edh->ebh", x, self.up))
        mixed = torch.einsum("ebh,ehd,be->bd", h, self.down, weights)
        return self.norm(x + mixed)

    @staticmethod
    def case(size: Size) -> Example:
        b, d, h, e = (131, 72, 104, 12) if size == "cpu" else (16_384, 768, 1536, 4)
        return randomised(SoftMoE(d, h, e)), (normal(b, d),)


class InfoNCE(Entry, name="info_nce"):
    """Two towers' outputs normalised, in-batch negatives, symmetric loss written with logsumexp."""

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u, v = F.normalize(users, dim=-1), F.normalize(items, dim=-1)
        scores = u @ v.T * 20.0
        diagonal = (u * v).sum(-1) * 20.0
        return (torch.logsumexp(scores, dim=1) - diagonal).mean()

    @staticmethod
    def case(size: Size) -> Example:
        b, d = (93, 72) if size == "cpu" else (16_384, 256)
        return InfoNCE(), (normal(b, d), normal(b, d))
