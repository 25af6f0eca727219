"""The public CUDA run: full block, forward+backward, (B,T,D,k) = (4,16,128,2), seed 7101.

A launch check: one pass whose output and gradients must be present and finite, then the runner's
own measurement. It compares against nothing and is not numerical acceptance.
"""

import sys

import torch

from rank_mixer_src.bench_rank_mixer import bench
from rank_mixer_src.environment import missing_for_cuda
from rank_mixer_src.runner import BenchConfig, require_complete, seeded_case

PUBLIC = BenchConfig(
    batch_size=4,
    tokens=16,
    dim=128,
    k=2,
    ffn_type="dense_v2",
    gemm_backend="bmm",
    warmup=2,
    num_tests=3,
    seed=7101,
)


def main() -> int:
    """Run the check and return the exit status."""
    missing = missing_for_cuda()
    if missing:
        print(f"public_check.py: error: {missing}", file=sys.stderr)
        return 1
    case = seeded_case(PUBLIC, torch.device("cuda", 0))
    require_complete(case, case.step())
    bench(PUBLIC)
    print("public check: PASS (shapes, finite output and gradients, timing)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
