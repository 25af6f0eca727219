"""Calls between small and large: the bits of step by step, and hardly more memory."""

from __future__ import annotations

import pytest
import torch
from support import block_case, step, upstream_for

import megafuse
from megafuse.runtime import arena

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

SHAPES = [(1024, 16, 512, 2), (508, 15, 210, 3), (431, 10, 470, 3), (262, 13, 299, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_step_by_step(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    case = block_case(shape, torch.bfloat16, device="cuda")
    module, args = case.module, list(case.args)
    upstream = upstream_for([module(*args)])
    peaks, results = [], []
    for limit in (arena.MIDDLE_BYTES, -1):
        monkeypatch.setattr(arena, "MIDDLE_BYTES", limit)
        fused = megafuse.fuse(module)
        first = step(fused, list(fused.parameters()), args, upstream)
        (compiled,) = next(iter(fused._plans.values()))
        for executor in (compiled.forward, compiled.backward):
            assert executor is not None
            programs = [r.program for r in executor.recipes.values()]
            assert all((p is None) == (limit < 0) for p in programs) and programs
        del first
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            got = step(fused, list(fused.parameters()), args, upstream)
            del got
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append([r for r in step(fused, list(fused.parameters()), args, upstream)
                        if r is not None])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[0] <= 1.05 * peaks[1], peaks
