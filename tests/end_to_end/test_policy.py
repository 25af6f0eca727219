"""The policy of docs/proposal.md on the block, on generated host code, 8 seeds pooled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support import REPOSITORY, block_case, step

import megafuse
from megafuse import Options
from megafuse.runtime.host import sanitizer_env
from megafuse.subgraphs import Settings, WorkloadSubgraph
from megafuse.tools.candidate import Candidate
from megafuse.tools.check import check_cases

SHAPES = [(2, 4, 16, 2), (3, 8, 72, 2), (5, 24, 120, 3), (1, 8, 64, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    candidate = Candidate(WorkloadSubgraph("rankmixer", Settings(shape, dtype)), Options())
    report = check_cases(candidate.make, range(8), float32=False)  # float32 is the other half
    (stage,) = report.stages
    assert report.passed, str(report)
    assert stage.seeds == 8 and stage.dtype == dtype
    # output, input gradient, and the gradients of w1, b1, wout, bout and of ten norm parameters
    assert len(stage.tensors) == 16 and all(t.pooled_limit is not None for t in stage.tensors)


def test_float16_and_eager_rounding() -> None:
    for dtype, options in (
        (torch.float16, Options()), (torch.bfloat16, Options(rounding="eager")),
    ):  # fmt: skip
        subgraph = WorkloadSubgraph("rankmixer", Settings((3, 8, 72, 2), dtype))
        report = check_cases(Candidate(subgraph, options).make, range(8), float32=False)
        assert report.passed, str(report)


def test_a_wrong_epsilon_does_not_pass() -> None:
    """The check has teeth: the same block with another epsilon in one norm is refused."""
    subgraph = WorkloadSubgraph("rankmixer", Settings((3, 8, 72, 2), torch.float32))

    def make(seed: int, dtype: torch.dtype | None) -> tuple[object, object]:
        case, other = subgraph.case(seed), subgraph.case(seed)
        other.module.norm_x.eps = 1e-4
        return case, other.module

    assert not check_cases(make, range(8)).passed  # type: ignore[arg-type]


SCRIPT = """
import torch
from small_modules import make
from support import block_case, step
import megafuse
from megafuse import Options
case = block_case((5, 24, 120, 3), torch.bfloat16)
cases = [(case.module, case.args, 0.05), (*make("residual"), 1e-4), (*make("column_sums"), 1e-4)]
for module, args, near in cases:
    fused = megafuse.fuse(module, options=Options(sanitize=True))
    got = step(fused, list(fused.parameters()), args)
    want = step(module, list(module.parameters()), args)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= near * b.norm(), type(module)
    print("clean", flush=True)
"""


def test_generated_code_under_sanitizers() -> None:
    """Forward and backward under the address and undefined-behaviour sanitizers.

    The block in bfloat16 only (its sanitized kernels take a minute to compile), float32 on less.
    """
    folders = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/end_to_end")]
    paths = os.pathsep.join([*folders, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True,
        check=False, env={**os.environ, **sanitizer_env(), "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("clean") == 3
    assert "runtime error" not in done.stderr and "AddressSanitizer" not in done.stderr


def test_repeated_runs_are_bitwise_equal_and_batch_is_free() -> None:
    case = block_case((3, 8, 72, 2), torch.bfloat16)
    fused = megafuse.fuse(case.module)
    parameters = list(fused.parameters())
    first, second = (step(fused, parameters, case.args, [case.grad_output]) for _ in range(2))
    assert len(first) == 16
    for a, b in zip(first, second, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
    # Another batch size runs the same plan; a product of one row may round differently.
    alone = step(fused, [], [case.args[0][1:2].detach().requires_grad_()],
                 [case.grad_output[1:2]])  # fmt: skip
    assert sum(map(len, fused._plans.values())) == 1
    assert first[0] is not None and first[1] is not None
    for whole, one in zip(first[:2], alone, strict=True):
        torch.testing.assert_close(whole[1:2], one, rtol=2e-2, atol=2e-2)
