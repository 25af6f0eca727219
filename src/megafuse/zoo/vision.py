"""Images and diffusion: mixers, convolutional blocks, modulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafuse.zoo.entry import Entry, Example, Size, normal, randomised


class MLPMixerBlock(Entry, name="mlp_mixer"):
    """MLP-Mixer: a token-mixing MLP over transposed patches, then a channel MLP."""

    def __init__(self, patches: int, dim: int, token_hidden: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(
            nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches)
        )
        self.channel = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))

    @staticmethod
    def case(size: Size) -> Example:
        b, p, d, ht, hc = (5, 25, 72, 40, 136) if size == "cpu" else (128, 196, 768, 384, 3072)
        return randomised(MLPMixerBlock(p, d, ht, hc)), (normal(b, p, d),)


class SqueezeExcite(Entry, name="squeeze_excite"):
    """Squeeze-and-excitation: channels scaled by a gate computed from their means."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, reduced), nn.Linear(reduced, channels)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean(dim=(2, 3))
        s = torch.sigmoid(self.up(F.relu(self.down(s))))
        return F.relu(x * s[:, :, None, None] + x)

    @staticmethod
    def case(size: Size) -> Example:
        b, c, r, n = (9, 48, 16, 7) if size == "cpu" else (128, 256, 16, 56)
        return SqueezeExcite(c, r), (normal(b, c, n, n),)


class ConvNeXtBlock(Entry, name="convnext"):
    """ConvNeXt: depthwise convolution, channels-last LayerNorm, MLP, layer scale, residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dwconv(x).permute(0, 2, 3, 1)
        h = self.gamma * self.down(F.gelu(self.up(self.norm(h))))
        return x + h.permute(0, 3, 1, 2)

    @staticmethod
    def case(size: Size) -> Example:
        b, d, n = (4, 48, 10) if size == "cpu" else (128, 192, 28)
        return randomised(ConvNeXtBlock(d)), (normal(b, d, n, n),)


class DiTBlock(Entry, name="dit_adaln"):
    """Diffusion Transformer block: adaLN-Zero around attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 6 * dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        b, t, d = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        h = F.layer_norm(x, (d,), eps=1e-6) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + gate1 * self.proj(y)
        h = F.layer_norm(x, (d,), eps=1e-6) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))

    @staticmethod
    def case(size: Size) -> Example:
        b, t, d, h = (6, 22, 64, 4) if size == "cpu" else (64, 256, 768, 12)
        return DiTBlock(d, h), (normal(b, t, d), normal(b, d))


class FiLM(Entry, name="film"):
    """Feature-wise linear modulation of an image by a condition, with a residual."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.affine = nn.Linear(condition, 2 * channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gamma, beta = self.affine(condition).split(x.shape[1], dim=1)
        h = (1 + gamma[..., None, None]) * x + beta[..., None, None]
        return x + F.silu(h)

    @staticmethod
    def case(size: Size) -> Example:
        b, c, k, n = (6, 40, 24, 9) if size == "cpu" else (128, 256, 128, 56)
        return FiLM(c, k), (normal(b, c, n, n), normal(b, k))


class GroupNormBlock(Entry, name="group_norm"):
    """The residual half of a diffusion U-Net: GroupNorm, SiLU, 1x1 convolution as a product."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.weight = nn.Parameter(torch.randn(channels, channels) / channels**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm(x))
        return x + torch.einsum("oc,bchw->bohw", self.weight, h)

    @staticmethod
    def case(size: Size) -> Example:
        b, c, g, n = (5, 48, 8, 9) if size == "cpu" else (64, 320, 32, 64)
        return randomised(GroupNormBlock(c, g)), (normal(b, c, n, n),)


class BottleneckTail(Entry, name="batch_norm_eval"):
    """The end of a ResNet bottleneck with frozen BatchNorm: norm, shortcut, ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return F.relu(self.norm(x) + shortcut)

    @staticmethod
    def case(size: Size) -> Example:
        b, c, n = (5, 40, 9) if size == "cpu" else (256, 256, 56)
        module = randomised(BottleneckTail(c)).eval()
        nn.init.uniform_(module.norm.running_var, 0.5, 2.0)  # type: ignore[union-attr,arg-type]
        return module, (normal(b, c, n, n), normal(b, c, n, n))
