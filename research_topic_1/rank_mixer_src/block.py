"""The RankMixer block: outer norms, token mixing, residuals and the dense per-token FFN."""

import torch
from torch import Tensor

from .ffn import dense_ffn_v2_compute
from .gemm import GEMM_BACKENDS
from .initializer import he_uniform

FFN_TYPES = ("dense_v2",)


class NezhaLayerNorm(torch.nn.Module):
    """LayerNorm over the last axis, eps 1e-3; `gamma` starts at ones, `beta` at zeros, both [D]."""

    epsilon = 1e-3

    def __init__(
        self,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(dim, dtype=dtype, device=device))
        self.beta = torch.nn.Parameter(torch.zeros(dim, dtype=dtype, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise [...,D] in the same dtype; another extent or dtype raises RuntimeError."""
        return torch.nn.functional.layer_norm(
            inputs, self.gamma.shape, self.gamma, self.beta, eps=self.epsilon
        )


def token_mixer(inputs: Tensor) -> Tensor:
    """Swap token and head axes: [B,T,D] as [B,T,T,D/T], transpose the two T axes, back to [B,T,D].

    On [1,2,4] the rows [[0,1,2,3],[4,5,6,7]] become [[0,1,4,5],[2,3,6,7]]. Where T does not divide
    D the reshape raises RuntimeError.
    """
    batch, tokens, dim = inputs.shape
    heads = inputs.reshape(batch, tokens, tokens, dim // tokens)
    return heads.transpose(1, 2).reshape(batch, tokens, dim)


class RankMixerBlockFwd(torch.nn.Module):
    """One RankMixer block at EP=1; gradients come from autograd.

    state_dict, with H = k * D: norm0, norm1, norm2 .gamma and .beta [D]; w1 [T,D,2H], b1 [T,2H],
    wout [T,H,D], bout [T,D]; norm_x, norm_gate .weight and .bias [H]. w1, b1, wout and bout are
    he-uniform, drawn in that order; the norms start at identity. Every parameter has `dtype` and
    lives on `device` (PyTorch's defaults when None).

    Raises ValueError when T does not divide D, k is not 2 or 3, or a type or backend is unknown.
    """

    def __init__(
        self,
        tokens: int,
        dim: int,
        k: int = 2,
        *,
        ffn_type: str = "dense_v2",
        gemm_backend: str = "bmm",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if tokens < 1 or dim < 1 or dim % tokens:
            raise ValueError(f"T must divide D: got T={tokens}, D={dim}")
        if k not in (2, 3):
            raise ValueError(f"k must be 2 or 3: got {k}")
        if ffn_type not in FFN_TYPES:
            raise ValueError(f"unknown ffn_type {ffn_type!r}: available are {', '.join(FFN_TYPES)}")
        if gemm_backend not in GEMM_BACKENDS:
            available = ", ".join(GEMM_BACKENDS)
            raise ValueError(f"unknown gemm_backend {gemm_backend!r}: available are {available}")
        hidden = k * dim
        self.gemm = GEMM_BACKENDS[gemm_backend]
        self.norm0 = NezhaLayerNorm(dim, dtype=dtype, device=device)
        self.norm1 = NezhaLayerNorm(dim, dtype=dtype, device=device)
        self.w1 = he_uniform((tokens, dim, 2 * hidden), dtype=dtype, device=device)
        self.b1 = he_uniform((tokens, 2 * hidden), dtype=dtype, device=device)
        self.wout = he_uniform((tokens, hidden, dim), dtype=dtype, device=device)
        self.bout = he_uniform((tokens, dim), dtype=dtype, device=device)
        self.norm_x = torch.nn.LayerNorm(hidden, eps=1e-5, dtype=dtype, device=device)
        self.norm_gate = torch.nn.LayerNorm(hidden, eps=1e-5, dtype=dtype, device=device)
        self.norm2 = NezhaLayerNorm(dim, dtype=dtype, device=device)

    def forward(self, inputs: Tensor, overlap: str = "none", comp_only: bool = False) -> Tensor:
        """Map [B,T,D] to [B,T,D] in the parameters' dtype.

        `comp_only` leaves out the two FFN exchanges; at EP=1 both are identity and nothing changes.
        Raises ValueError for any `overlap` but "none".
        """
        if overlap != "none":
            raise ValueError(f"overlap must be 'none' at EP=1: got {overlap!r}")
        out1 = token_mixer(self.norm0(inputs))
        out1 = self.norm1(out1 + inputs)
        out2 = dense_ffn_v2_compute(
            out1,
            self.w1,
            self.b1,
            self.wout,
            self.bout,
            self.norm_x,
            self.norm_gate,
            gemm=self.gemm,
        )
        output: Tensor = self.norm2(out1 + out2)
        return output
