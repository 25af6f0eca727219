"""Start the workers: check options and GPUs once, then hand over to torchrun."""

import os
import sys
from pathlib import Path

from .cli import backend_list, parse_args
from .environment import missing_for_cuda


def worker_count() -> int:
    """Read NPROC, default 8. Raises ValueError unless it is a positive whole number."""
    text = os.environ.get("NPROC") or "8"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"NPROC must be a positive whole number: got {text!r}")
    return int(text)


def main(argv: list[str]) -> int:
    """Replace this process by torchrun, or return an exit status when there is nothing to start."""
    if parse_args(argv) is None:
        print(backend_list())
        return 0
    try:
        workers = worker_count()
    except ValueError as error:
        problem: str | None = str(error)
    else:
        problem = missing_for_cuda(workers)
    if problem:
        print(f"bench_rank_mixer.py: error: {problem}", file=sys.stderr)
        return 1
    entry = Path(__file__).resolve().with_name("bench_rank_mixer.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc_per_node={workers}", str(entry), *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
