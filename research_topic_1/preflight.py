"""Check that this environment can run the workload: `python preflight.py --target cpu|cuda`.

Runs the real full block at (B,T,D,k) = (2,4,16,2), forward and backward, on the target. A version
other than the documented one is a warning; only a missing capability fails.
"""

import argparse
import platform
import re
import sys
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {"cpu": "requirements-cpu.txt", "cuda": "requirements.txt"}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


def version_warnings(target: str) -> list[str]:
    """Compare the interpreter and the installed packages with the target's pins."""
    found = platform.python_version()
    warnings = [] if found.startswith("3.12.") else [f"Python is {found}, documented is 3.12"]
    pins = re.findall(r"^([\w-]+)==(\S+)$", (HERE / REQUIREMENTS[target]).read_text(), re.MULTILINE)
    for name, documented in pins:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != documented:
            warnings.append(f"{name} is {installed}, documented is {documented}")
    return warnings


def check_token_mixing() -> None:
    """Raise RuntimeError unless the brief's example comes out."""
    import torch

    from rank_mixer_src.block import token_mixer

    mixed = token_mixer(torch.arange(8).reshape(1, 2, 4)).tolist()
    if mixed != [[[0, 1, 4, 5], [2, 3, 6, 7]]]:
        raise RuntimeError(f"token mixing of the 2x4 example gave {mixed}")


def check_block(device: str, dtype: str, gemm_backend: str) -> None:
    """Raise RuntimeError unless the full block runs with finite output and gradients."""
    import torch

    from rank_mixer_src.runner import BenchConfig, require_complete, seeded_case

    config = BenchConfig(2, 4, 16, 2, gemm_backend=gemm_backend, dtype=dtype)
    case = seeded_case(config, torch.device(device))
    require_complete(case, case.step())


def check_timing() -> None:
    """Run the timing utility once on the GPU: NCCL barrier, L2 flush and events."""
    import torch

    from rank_mixer_src.bench_rank_mixer import nccl_group
    from rank_mixer_src.runner import BenchConfig, seeded_case
    from rank_mixer_src.timing import time_fwd_bwd

    device = torch.device("cuda", torch.cuda.current_device())
    case = seeded_case(BenchConfig(2, 4, 16, 2), device)
    with nccl_group():
        time_fwd_bwd(case.step, 1, 2, device)


def main() -> int:
    """Print warnings and passes; return 0, or 1 with one line when the target cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", choices=tuple(REQUIREMENTS), required=True)
    target = parser.parse_args().target
    for warning in version_warnings(target):
        print(f"WARN {warning}")
    missing = None
    if util.find_spec("torch") is None:
        missing = f"PyTorch is not installed: install {REQUIREMENTS[target]}"
    elif target == "cuda":
        import torch

        from rank_mixer_src.environment import missing_for_cuda

        missing = missing_for_cuda()
        if not missing and (capability := torch.cuda.get_device_capability()) != (9, 0):
            print(f"WARN GPU is SM{capability[0]}{capability[1]}, documented is SM90")
    if missing:
        print(f"preflight.py: error: {missing}", file=sys.stderr)
        return 1
    try:
        check_token_mixing()
        print("PASS token mixing example")
        for dtype in DTYPES[target]:
            for gemm_backend in ("bmm", "grouped"):
                check_block(target, dtype, gemm_backend)
                print(f"PASS full block fwd+bwd (2,4,16,2) {target} {dtype} {gemm_backend}")
        if target == "cuda":
            check_timing()
            print("PASS timing utility: NCCL barrier, L2 flush, CUDA events")
    except RuntimeError as error:
        print(f"preflight.py: error: {error}", file=sys.stderr)
        return 1
    print(f"preflight {target}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
