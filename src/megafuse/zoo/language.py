"""Language models: feed-forward blocks, attention, rotary embedding, losses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.zoo.entry import Entry, Example, RMSNorm, Size, normal, randomised


class LlamaFFN(Entry, name="llama_ffn"):
    """Llama feed-forward block: RMSNorm, SwiGLU, residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (3, 27, 96, 176) if size == "cpu" else (8, 2048, 1024, 2816)
        return randomised(LlamaFFN(d, h)), (normal(b, t, d),)


class T5GatedFFN(Entry, name="t5_gated_gelu"):
    """T5 v1.1 feed-forward block: scale-only norm, tanh GELU gate, residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.wi_0 = nn.Linear(dim, hidden, bias=False)
        self.wi_1 = nn.Linear(dim, hidden, bias=False)
        self.wo = nn.Linear(hidden, dim, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = hidden_states * torch.rsqrt(variance + 1e-6)
        x = self.weight * x.to(self.weight.dtype)
        gated = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)
        return hidden_states + self.wo(gated)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (2, 33, 88, 168) if size == "cpu" else (16, 1024, 768, 2048)
        return randomised(T5GatedFFN(d, h)), (normal(b, t, d),)


class LoRALinear(Entry, name="lora_linear"):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, dim: int, out: int, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.base = nn.Linear(dim, out)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, dim) / math.sqrt(dim))
        self.b = nn.Parameter(torch.randn(out, rank) / math.sqrt(rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.base(x) + (x @ self.a.T) @ self.b.T * self.scale)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, o, r = (3, 25, 80, 144, 8) if size == "cpu" else (8, 2048, 2048, 4096, 16)
        return LoRALinear(d, o, r), (normal(b, t, d),)


class Rotary(Entry, name="rotary"):
    """Rotary position embedding of queries and keys, half-split form."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head: int) -> None:
        super().__init__()
        frequency = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
        angle = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[None, None], self.sin[None, None]
        return q * cos + self.rotate_half(q) * sin, k * cos + self.rotate_half(k) * sin

    @staticmethod
    def case(size: Size) -> Example:
        b, h, t, d = (2, 3, 22, 32) if size == "cpu" else (8, 32, 2048, 128)
        return Rotary(t, d), (normal(b, h, t, d), normal(b, h, t, d))


class ExplicitAttention(Entry, name="attention_softmax"):
    """Causal self-attention with the softmax written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (2, 37, 96, 4) if size == "cpu" else (8, 1024, 1024, 16)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        return ExplicitAttention(d, h), (normal(b, t, d), mask)


class FusedAttention(Entry, name="attention_sdpa"):
    """Pre-norm causal self-attention through scaled_dot_product_attention, with residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (2, 36, 96, 4) if size == "cpu" else (8, 2048, 1024, 16)
        return randomised(FusedAttention(d, h)), (normal(b, t, d),)


class EncoderLayer(Entry, name="encoder_layer"):
    """torch's post-norm Transformer encoder layer, in eval: its dropouts do nothing."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            dim, heads, hidden, activation="gelu", batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h, f = (3, 41, 96, 4, 184) if size == "cpu" else (32, 512, 768, 12, 3072)
        return randomised(EncoderLayer(d, h, f)).eval(), (normal(b, t, d),)


class BertEmbedding(Entry, name="bert_embedding"):
    """Word, position and segment embeddings added and normalised."""

    def __init__(self, words: int, length: int, dim: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, dim)
        self.position = nn.Embedding(length, dim)
        self.segment = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.register_buffer("places", torch.arange(length))

    def forward(self, words: Tensor, segments: Tensor) -> Tensor:
        h = self.word(words) + self.segment(segments) + self.position(self.places)
        return self.norm(h)

    @staticmethod
    def case(size: Size) -> Example:
        b, t, v, d = (3, 29, 50, 72) if size == "cpu" else (256, 512, 30_000, 768)
        words, segments = torch.randint(v, (b, t)), torch.randint(2, (b, t))
        return randomised(BertEmbedding(v, t, d)), (words, segments)


class LMLoss(Entry, name="softmax_cross_entropy"):
    """A language model's head and its cross-entropy, with some labels ignored."""

    def __init__(self, dim: int, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h).float(), labels, ignore_index=-100)

    @staticmethod
    def case(size: Size) -> Example:
        n, d, v = (137, 48, 330) if size == "cpu" else (8192, 512, 32_000)
        labels = torch.randint(v, (n,))
        labels[::5] = -100
        return LMLoss(d, v), (normal(n, d), labels)


class SmoothedNLL(Entry, name="log_softmax_nll"):
    """log_softmax and NLL with label smoothing, from logits."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        logp = F.log_softmax(logits, dim=-1)
        smooth = -logp.mean(dim=-1)
        return (0.9 * F.nll_loss(logp, labels, reduction="none") + 0.1 * smooth).mean()

    @staticmethod
    def case(size: Size) -> Example:
        n, v = (129, 177) if size == "cpu" else (32_768, 8192)
        return SmoothedNLL(), (normal(n, v), torch.randint(v, (n,)))
