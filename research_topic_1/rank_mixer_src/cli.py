"""The options of the runner. EP, backward, flushing and eager execution are fixed."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from .block import FFN_TYPES
from .gemm import BACKEND_NOTES, GEMM_BACKENDS
from .runner import DTYPES, BenchConfig


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; `--help` shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _at_least(minimum: int, text: str) -> int:
    value = int(text)
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be at least {minimum}: got {value}")
    return value


def positive(text: str) -> int:
    return _at_least(1, text)


def non_negative(text: str) -> int:
    return _at_least(0, text)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; defaults are BenchConfig's."""
    default = BenchConfig()
    parser = _Parser(
        prog="bench_rank_mixer.py",
        description="Time forward+backward of the RankMixer block (EP=1, overlap=none, eager).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list-backends", action="store_true", help="list GEMM backends and exit")
    add("--batch-size", type=positive, default=default.batch_size, help="B (default %(default)s)")
    add("--tokens", type=positive, default=default.tokens, help="T (default %(default)s)")
    add("--dim", type=positive, default=default.dim, help="D, T divides it (default %(default)s)")
    add("--k", type=int, choices=(2, 3), default=default.k, help="H = k*D (default %(default)s)")
    add(
        "--ffn-type",
        choices=(*FFN_TYPES, "sparse_moe"),
        default=default.ffn_type,
        help="sparse_moe is refused: it is not part of this package yet",
    )
    add("--moe-experts", type=int, choices=(2, 4), help="belongs to sparse_moe, refused with it")
    add("--gemm-backend", choices=tuple(GEMM_BACKENDS), default=default.gemm_backend)
    add("--dtype", choices=tuple(DTYPES), default=default.dtype)
    add("--tf32", action="store_true", help="TF32 for float32 products")
    add("--warmup", type=non_negative, default=default.warmup, help="default %(default)s")
    add(
        "--num-tests",
        type=positive,
        default=default.num_tests,
        help="measured calls, the first dropped when there are more (default %(default)s)",
    )
    return parser


def parse_args(argv: Sequence[str] | None = None) -> BenchConfig | None:
    """Parse `argv` (default sys.argv[1:]); None asks for the list of backends.

    An unknown or unsupported option prints one line to standard error and exits with status 2.
    """
    parser = build_parser()
    args = vars(parser.parse_args(argv))
    list_backends, moe_experts = args.pop("list_backends"), args.pop("moe_experts")
    if args["ffn_type"] == "sparse_moe":
        parser.error("--ffn-type sparse_moe is not implemented in this package yet; use dense_v2")
    if moe_experts is not None:
        parser.error("--moe-experts belongs to --ffn-type sparse_moe, which is not implemented yet")
    if list_backends:
        return None
    config = BenchConfig(**args)
    if config.dim % config.tokens:
        parser.error(f"--tokens must divide --dim: got {config.tokens} and {config.dim}")
    return config


def backend_list() -> str:
    """One line a backend: its name and what it calls."""
    return "\n".join(f"{name}: {BACKEND_NOTES[name]}" for name in GEMM_BACKENDS)
