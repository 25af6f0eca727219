"""What a group keeps in shared memory, and what it must not."""

from __future__ import annotations

import pytest
import torch
from support import block_case
from torch import Tensor

import megafuse
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.shelf import shelvable
from megafuse.codegen.turn import ROOM
from megafuse.fusion.plan import GraphPlan, RowRegion


def groups(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[GraphPlan, RowRegion]]:
    case = block_case(shape, dtype)
    compiled = megafuse.fuse(case.module).build(*case.args, **case.kwargs)
    assert compiled is not None
    plan = compiled.plan
    return [(p, r) for p in (plan.forward, plan.backward) if p is not None
            for r in p.regions if isinstance(r, RowRegion) and r.kind == "group"]  # fmt: skip


def test_the_block_keeps_its_samples_and_its_gradients() -> None:
    (_, forward), (_, backward) = groups(3, 8, 64, 2)
    sample = shelvable(forward)[0]
    assert (sample.rows, sample.columns, sample.made, sample.uses) == (8, 64, False, 2)
    gradient = shelvable(backward)[0]
    assert (gradient.rows, gradient.columns, gradient.made, gradient.uses) == (8, 64, True, 2)
    assert gradient.alone and gradient.nbytes == 8 * (64 + 16) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_with_a_shelf_come_first_and_fit(dtype: torch.dtype) -> None:
    for plan, region in groups(3, 8, 64, 2, dtype=dtype):
        schedule = next(iter(cuda_schedules(region, 1 << 20)))
        assert schedule.shelf
        kernel = emit_rows(region, plan.buffers, schedule, False, "mf_test")
        assert 0 < kernel.shared <= ROOM
        for node in kernel.inside:  # what stays inside has no memory, and no argument
            assert all(arg.node is not node for arg in kernel.args)
        few = next(iter(cuda_schedules(region, 24)))
        assert not few.shelf


def test_what_others_read_goes_to_memory_as_well() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.layer_norm(x, (32,))
        mixed = y.reshape(-1, 4, 4, 8).transpose(1, 2).reshape(-1, 4, 32)
        return y, torch.nn.functional.layer_norm(mixed, (32,)) * w

    x, w = torch.randn(5, 4, 32), torch.randn(32)
    compiled = megafuse.fuse(f).build(x, w)
    assert compiled is not None
    regions = [r for r in compiled.plan.forward.regions if isinstance(r, RowRegion)]
    made = [s for r in regions for s in shelvable(r) if s.made]
    assert made and not any(s.alone for s in made)
