"""Build a seeded case and run its forward+backward: what the benchmark and the checks share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .block import RankMixerBlockFwd
from .timing import Timing, time_fwd_bwd

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BenchConfig:
    """Shape, precision, backend, sample counts and seed; by default the production shape."""

    batch_size: int = 1024
    tokens: int = 64
    dim: int = 1280
    k: int = 2
    ffn_type: str = "dense_v2"
    gemm_backend: str = "bmm"
    dtype: str = "bfloat16"
    tf32: bool = False
    warmup: int = 2
    num_tests: int = 3
    seed: int = 0

    def __str__(self) -> str:
        """The line a run prints. At EP=1 every token is local and no byte is exchanged."""
        return (
            f"B={self.batch_size} T={self.tokens} D={self.dim} k={self.k} H={self.k * self.dim} "
            f"T_local={self.tokens} EP=1 overlap=none A2A_bytes_per_rank=0 mode=fwd+bwd "
            f"ffn={self.ffn_type} gemm={self.gemm_backend} dtype={self.dtype} "
            f"tf32={'on' if self.tf32 else 'off'} warmup={self.warmup} num_tests={self.num_tests} "
            f"seed={self.seed}"
        )


@dataclass(frozen=True)
class Case:
    """A block with its input (a leaf that requires grad) and upstream gradient, all of one dtype.

    `inputs` and `grad_output` are [B,T,D].
    """

    block: RankMixerBlockFwd
    inputs: Tensor
    grad_output: Tensor

    def step(self) -> Tensor:
        """The measured call: clear gradients, forward, backward. Returns the output [B,T,D]."""
        self.inputs.grad = None
        self.block.zero_grad(set_to_none=True)
        out: Tensor = self.block(self.inputs, overlap="none")
        out.backward(self.grad_output)  # type: ignore[no-untyped-call]
        return out


def seeded_case(config: BenchConfig, device: torch.device, rank: int = 0) -> Case:
    """Seed the process with seed+rank, construct the block, then draw the input.

    The upstream gradient has a generator of its own on `device`, seeded with seed+1000+rank.
    """
    dtype = DTYPES[config.dtype]
    torch.manual_seed(config.seed + rank)
    block = RankMixerBlockFwd(
        config.tokens,
        config.dim,
        config.k,
        ffn_type=config.ffn_type,
        gemm_backend=config.gemm_backend,
        dtype=dtype,
        device=device,
    )
    shape = (config.batch_size, config.tokens, config.dim)
    inputs = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    generator = torch.Generator(device=device).manual_seed(config.seed + 1000 + rank)
    grad_output = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return Case(block, inputs, grad_output)


def require_complete(case: Case, output: Tensor) -> None:
    """Raise RuntimeError unless output and gradients exist, finite, shaped as their tensors."""
    pairs = {"output": (output, case.inputs), "inputs.grad": (case.inputs.grad, case.inputs)}
    pairs |= {f"{name}.grad": (p.grad, p) for name, p in case.block.named_parameters()}
    for name, (value, like) in pairs.items():
        if value is None:
            raise RuntimeError(f"{name} is missing")
        if value.shape != like.shape or value.dtype != like.dtype:
            raise RuntimeError(f"{name} has shape {tuple(value.shape)} and {value.dtype}")
        if not torch.isfinite(value).all():
            raise RuntimeError(f"{name} has non-finite values")


def run_benchmark(config: BenchConfig, device: torch.device, rank: int = 0) -> Timing:
    """Run once untimed and check the output shape, then time the complete step on a CUDA device.

    Sets the process-wide TF32 switch for matrix products to `config.tf32`.
    Raises RuntimeError when the output shape differs from the input's.
    """
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    case = seeded_case(config, device, rank)
    output = case.step()
    if output.shape != case.inputs.shape:
        raise RuntimeError(f"output is {tuple(output.shape)}, input {tuple(case.inputs.shape)}")
    del output
    return time_fwd_bwd(case.step, config.warmup, config.num_tests, device)
