"""Random modules against eager in float64: outputs, gradients, layouts.

MEGAFUSE_GRAPHS sets how many (50), MEGAFUSE_SEED draws others than the usual ones:

    MEGAFUSE_GRAPHS=500 ./dev test tests/property

A failure is shrunk and printed as a module that runs by itself.
"""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from graphs import BINARY, JUMPS, UNARY, Program, programs
from hypothesis import HealthCheck, assume, given, seed, settings
from support import ROUNDOFF, in_float64, rms, step, tensors_of, upstream_for
from torch import Tensor

import megafuse
from megafuse import Options
from megafuse.ops.pointwise import TABLE
from megafuse.tools.steps import InFloat64

GRAPHS = int(os.environ.get("MEGAFUSE_GRAPHS", "50"))
SEED = int(os.environ.get("MEGAFUSE_SEED", "0"))
SHARES = 5
SECONDS_A_GRAPH = 120
ROOM = 4
"""How far beyond the policy's limits for one seed a random module may be: it may be as badly
conditioned as chance likes. What is wrong is further out."""

OWN_LAYOUT = "logsigmoid"
"""Its CPU kernel makes its result contiguous, CUDA's and the one without data keep the strides."""


def near(name: str, got: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert got.shape == eager.shape and got.dtype == eager.dtype, name
    if not eager.is_floating_point():
        assert torch.equal(got, eager), name
        return
    u = ROUNDOFF[got.dtype]
    errors, ours = (eager.double() - exact).abs(), (got.double() - exact).abs()
    size = max(rms(exact), 1.0)  # inputs are of size 1: what is smaller comes of cancellation
    limit = ROOM * (1.3 * rms(errors) + 2 * u * size)
    assert rms(ours) <= limit, f"{name}: error {rms(ours):.3e}, limit {limit:.3e}"
    peak = ROOM * (2 * errors.max().item() + 6 * u * max(size, exact.abs().max().item()))
    assert ours.max().item() <= peak, f"{name}: largest error {ours.max():.3e}, limit {peak:.3e}"


def steps(x: Tensor) -> list[int]:
    return [stride for extent, stride in zip(x.shape, x.stride(), strict=True) if extent > 1]


def dense(x: Tensor) -> bool:
    """Whether `x` is neither expanded nor a window of something larger."""
    return torch.empty_like(x).stride() == x.stride()


def check(program: Program) -> None:
    names: dict[str, Any] = {}
    exec(compile(program.source(), "<random module>", "exec"), names)
    module, args = names["Graph"](), names["inputs"]()
    outputs = tensors_of(module(*args))
    upstream = upstream_for(outputs)
    parameters = list(module.parameters())
    eager = step(module, parameters, args, upstream)
    wide = copy.deepcopy(module).double()
    with InFloat64():
        exact = step(wide, list(wide.parameters()), in_float64(args), in_float64(upstream))
    for value in (*eager, *exact):
        assume(value is None or bool(value.isfinite().all()))
    fused = megafuse.fuse(module, options=eval(program.options, {"Options": Options}))
    got = step(fused, parameters, args, upstream)
    again = step(fused, parameters, args, upstream)
    assert len(got) == len(eager)
    for i, (mine, twin, theirs, true) in enumerate(zip(got, again, eager, exact, strict=True)):
        name = f"output {i}" if i < len(outputs) else f"gradient {i - len(outputs)}"
        assert (mine is None) == (theirs is None), f"{name}: {mine is None}, {theirs is None}"
        if mine is not None and theirs is not None and true is not None and twin is not None:
            near(name, mine, theirs, true)
            assert torch.equal(mine, twin), f"{name}: two runs differ"
            if i < len(outputs) and dense(theirs) and OWN_LAYOUT not in program.source():
                assert steps(mine) == steps(theirs), f"{name}: strides {mine.stride()}"


@pytest.mark.parametrize("share", range(SHARES))
def test_random_modules(share: int) -> None:
    @seed(SEED * SHARES + share)
    @settings(
        max_examples=-(-GRAPHS // SHARES), deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(programs())
    def run(program: Program) -> None:
        signal.alarm(SECONDS_A_GRAPH)
        try:
            check(program)
        except Exception as error:
            if type(error).__module__.startswith("hypothesis"):
                raise
            raise AssertionError(f"{error}\n\n{program.source()}") from error

    run()


def test_every_operator_of_the_table_may_be_drawn() -> None:
    assert {*UNARY, *BINARY, *JUMPS, "where", "cast"} == set(TABLE)


def test_printed_modules_run() -> None:
    """What a failure prints is a program: it checks itself."""
    program = Program(
        inputs=["x0 = torch.randn(3, 4)", "x0.requires_grad_()"],
        parameters=["self.w0 = nn.Parameter(torch.randn(4))"],
        lines=["v0 = torch.tanh(x0) * self.w0"], values={"x0": torch.empty(3, 4)}, outputs=["v0"],
    )  # fmt: skip
    printed: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda x: printed.append(str(x))}
    exec(program.source(), names)
    assert "PASS" in printed[0]


def test_a_wrong_result_is_found() -> None:
    """The comparison has teeth: a gradient that is a fifth short."""
    exact = torch.randn(5, 6, dtype=torch.float64)
    near("right", exact.float(), exact.float(), exact)
    with pytest.raises(AssertionError, match="wrong: error"):
        near("wrong", (exact * 0.8).float(), exact.float(), exact)
    with pytest.raises(AssertionError, match="one element"):
        off = exact.bfloat16()
        off[2, 3] += 0.3
        near("one element", off, exact.bfloat16(), exact)
