"""The dense per-token FFN subgraph, DensePFFNv2."""

import torch
from torch import Tensor

from .gemm import Gemm


def dense_ffn_v2_compute(
    inputs: Tensor,
    w1: Tensor,
    b1: Tensor,
    wout: Tensor,
    bout: Tensor,
    norm_x: torch.nn.LayerNorm,
    norm_gate: torch.nn.LayerNorm,
    *,
    gemm: Gemm = torch.bmm,
) -> Tensor:
    """Apply to each token t its own gated FFN: [B,T,D] in, [B,T,D] out, one dtype throughout.

    Z = inputs @ w1 + b1, split into halves (U,G); hidden = norm_x(U) * silu(norm_gate(G));
    output = hidden @ wout + bout.

    Shapes: w1 [T,D,2H], b1 [T,2H], wout [T,H,D], bout [T,D]; both norms are LayerNorm(H).
    `gemm` maps ([T,B,K], [T,K,N]) to [T,B,N]. Mismatched shapes or dtypes raise RuntimeError.
    """
    z = gemm(inputs.transpose(0, 1), w1) + b1.unsqueeze(1)  # [T,B,2H]
    u, g = z.chunk(2, dim=-1)
    hidden = norm_x(u) * torch.nn.functional.silu(norm_gate(g))  # [T,B,H]
    output = gemm(hidden, wout) + bout.unsqueeze(1)  # [T,B,D]
    return output.transpose(0, 1)
