"""Row regions of the zoo in the layout a GPU would run them in, on the emulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_emulated_regions import Emulated, results

import megafuse
from megafuse import zoo
from megafuse.codegen.candidates import cuda_schedules
from megafuse.codegen.rows import emit_rows
from megafuse.codegen.schedule import by_block
from megafuse.fusion.plan import RowRegion
from megafuse.runtime.executor import BuiltRegion
from megafuse.subgraphs import Settings

MANY = 1 << 20  # rows: the layouts with rings, shelves and blocks that share a multiprocessor


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_entry(name: str) -> None:
    settings = Settings(None, torch.bfloat16, torch.device("cpu"))
    case = zoo.subgraph(name, settings, "cpu").case(0)
    compiled = megafuse.fuse(case.module).build(*case.args, **case.kwargs)
    assert compiled is not None and compiled.forward is not None
    seen = 0
    for executor in (compiled.forward, compiled.backward):
        if executor is None:
            continue
        for region in executor.plan.regions:
            if not isinstance(region, RowRegion):
                continue
            schedule = next(iter(cuda_schedules(region, MANY)))
            kernel = emit_rows(region, executor.plan.buffers, schedule, False, f"mf_{region.name}")
            module: Any = Emulated(kernel, by_block(region, schedule))
            sizes = dict(executor.plan.sizes)
            expected = results(executor, executor.built[region.name], sizes)
            got = results(executor, BuiltRegion(region, kernel, module, 2), sizes)
            assert got.keys() == expected.keys() - {n.name for n in kernel.inside} and got
            for key, value in got.items():
                want = expected[key]  # a row that is masked throughout is NaN in both
                assert torch.equal(value.isnan(), want.isnan())
                error = (value - want).nan_to_num().norm()
                assert error <= 2**-8 * want.nan_to_num().norm(), f"{region.name} {key}, {schedule}"
            seen += 1
    assert seen
