"""A product planned with additions in its epilogue, where PyTorch has to compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megafuse.compiler import make_plan
from megafuse.config import Options
from megafuse.fusion.plan import MatmulRegion
from megafuse.runtime.executor import Executor


def run(function: object, tensors: Sequence[Tensor]) -> Tensor:
    flags = [False] * len(tensors)
    plan = make_plan(function, tensors, flags, flags, None, Options(), epilogues=True)  # type: ignore[arg-type]
    (region,) = (r for r in plan.forward.regions if isinstance(r, MatmulRegion))
    assert region.extras
    sizes = plan.sizes_of(tensors)
    executor = Executor(plan.forward, torch.device("cpu"), Options(), None)
    (result,) = executor.run(list(tensors), tuple(sizes[k] for k in sorted(sizes)))
    return result.reshape(function(tensors).shape)  # type: ignore[operator,no-any-return]


def test_a_bias_is_rounded_once_as_in_eager() -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(s).bfloat16() for s in ((6, 64), (24, 64), (24,)))
    assert torch.equal(run(lambda t: F.linear(*t), (x, w, b)), F.linear(x, w, b))


def test_bias_and_residual() -> None:
    torch.manual_seed(1)
    x, w, b, r = (torch.randn(s).bfloat16() for s in ((6, 64), (64, 64), (64,), (6, 64)))
    got = run(lambda t: F.linear(*t[:3]) + t[3], (x, w, b, r)).double()
    exact = F.linear(x.double(), w.double(), b.double()) + r.double()
    eager = (F.linear(x, w, b) + r).double()
    assert (got - exact).norm() <= 1.1 * (eager - exact).norm()


def test_a_split_product_gets_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, torch.Size] = {}
    empty = torch.empty

    def noted(*args: Any, **more: Any) -> Tensor:
        tensor = empty(*args, **more)
        made[tensor.data_ptr()] = tensor.shape
        return tensor

    calls: list[tuple[Any, ...]] = []

    class Kernel:
        sums = 3 * 6 * 24
        aligned = staticmethod(lambda *_: True)

        def launch(self, *args: Any) -> None:
            calls.append((*args, dict(made)))

        def launches(self, *_: Any) -> None:
            return None

    kernel = Kernel()
    monkeypatch.setattr(Executor, "_matmul_kernel", lambda *_: kernel)
    monkeypatch.setattr("megafuse.runtime.executor.current_stream", lambda _: 7)
    monkeypatch.setattr(torch, "empty", noted)
    x, w, b = (torch.randn(s).bfloat16() for s in ((6, 64), (24, 64), (24,)))
    run(lambda t: F.linear(*t), (x, w, b))
    a, _, c, stream, rows, tensor, workspace, alive = calls[0]
    assert (a, stream, rows, tensor) == (x.data_ptr(), 7, [b.data_ptr()], 0)
    assert alive[workspace] == (3 * 6 * 24,) and alive[c] == (1, 6, 24)
