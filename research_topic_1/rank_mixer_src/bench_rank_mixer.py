"""Benchmark entry point: one worker, EP=1, overlap=none, forward+backward.

Run it directly for one GPU, or under torchrun for independent workers that share only the barrier.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if not __package__:  # run as a script: make the package that holds this file importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from rank_mixer_src.block import NezhaLayerNorm, RankMixerBlockFwd, token_mixer
from rank_mixer_src.cli import backend_list, parse_args
from rank_mixer_src.environment import missing_for_cuda
from rank_mixer_src.ffn import dense_ffn_v2_compute
from rank_mixer_src.runner import BenchConfig, run_benchmark

__all__ = [
    "NezhaLayerNorm",
    "RankMixerBlockFwd",
    "bench",
    "dense_ffn_v2_compute",
    "main",
    "nccl_group",
    "token_mixer",
]


@contextmanager
def nccl_group() -> Iterator[None]:
    """Hold the default NCCL group: torchrun's under torchrun, otherwise a group of one."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bench(config: BenchConfig) -> None:
    """Measure `config` on this worker's GPU; print it (rank 0) and the timing (every rank)."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    with nccl_group():
        rank = dist.get_rank()
        if rank == 0:
            print(f"RankMixerBlockFwd {config}", flush=True)
        timing = run_benchmark(config, device, rank)
        print(f"rank={rank} mode=fwd+bwd {timing}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, then list the backends or run. Returns the exit status."""
    config = parse_args(argv)
    if config is None:
        print(backend_list())
        return 0
    missing = missing_for_cuda(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if missing:
        print(f"bench_rank_mixer.py: error: {missing}", file=sys.stderr)
        return 1
    bench(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
