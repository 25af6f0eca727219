"""Generated regions in their device layouts, on the emulated device, against the host's build."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import block_case
from test_device_words import emulated_module

import megafuse
from megafuse.codegen.fit import layouts_of, with_shelf
from megafuse.codegen.rows import RowKernel, emit_rows
from megafuse.codegen.schedule import Schedule, by_block
from megafuse.fusion.plan import RowRegion
from megafuse.ir import evaluate
from megafuse.runtime.built import BuiltRegion, allocator
from megafuse.runtime.executor import Executor

SHAPE = (3, 8, 72, 2)
SIZES = {"s0": 3}
CPU = torch.device("cpu")

WAYS = {
    "ring": dict(depth=3),
    "ring of spans": dict(depth=3, in_turn=False),
    "lazy ring": dict(depth=2, lazy=True, keep=False),
    "early ring": dict(depth=2),
    "late ring": dict(depth=2, hold=False, early=False),
    "next row": dict(hold=False),
    "this row": dict(ahead=False, keep=False, in_turn=False),
}


@pytest.fixture(scope="module")
def executors() -> list[Executor]:
    return built(*SHAPE)


def built(*shape: int) -> list[Executor]:
    case = block_case(shape, torch.bfloat16)
    compiled = megafuse.fuse(case.module).build(*case.args, **case.kwargs)
    assert compiled is not None and compiled.forward and compiled.backward
    return [compiled.forward, compiled.backward]


class Emulated:
    """Stands in for a loaded host module: launches the kernels as the device would."""

    def __init__(self, kernel: RowKernel, by_block: bool) -> None:
        self.kernel, self.by_block = kernel, by_block
        self.module = emulated_module(kernel.source, kernel.names, fast=kernel.fast)
        self.parts = [a.kind for a in kernel.args].index("parts")

    def launch(self, name: str, args: Sequence[int]) -> None:
        geometry = [3, max(1, len(self.kernel.partial_columns)), 32, 8]
        if name == self.kernel.name:
            teams = self.kernel.schedule.teams
            grid = args[self.parts] if self.by_block else -(-args[self.parts] // teams)
            geometry = [grid, 1, self.kernel.schedule.threads, 1]
        self.module.launch(f"emulate_{name}", [*geometry, *args])


def results(
    executor: Executor, built: BuiltRegion, sizes: dict[str, int] = SIZES
) -> dict[str, torch.Tensor]:
    """What the region writes, from drawn inputs; of a concatenation its own part."""
    generator = torch.Generator().manual_seed(3)
    values: dict[Any, torch.Tensor] = {}
    for node in built.region.reads(executor.plan.buffers):
        shape = [evaluate(d, sizes) for d in node.shape]
        values[node] = allocator(node, sizes)(CPU).copy_(
            torch.rand(shape, generator=generator) + 0.5
        )
    given = set(values)
    for node in built.region.writes():
        if node.op == "cat":
            values[node] = allocator(node, sizes)(CPU).zero_()
    executor._row_step(built, sizes)(values)
    return {n.name: t.double() for n, t in values.items() if n not in given}


@pytest.mark.parametrize("team,teams,lanes", [(2, 2, 8), (64, 2, 4)])
@pytest.mark.parametrize("way,shelf", [*((w, False) for w in WAYS), ("ring", True)])
def test_every_region(
    executors: list[Executor], way: str, shelf: bool, team: int, teams: int, lanes: int
) -> None:
    compare(executors, way, shelf, team, teams, lanes)


@pytest.mark.parametrize("way", ["ring", "early ring", "late ring"])
@pytest.mark.parametrize("team,teams,lanes", [(4, 4, 8), (64, 2, 4)])
def test_groups_whose_rows_divide_evenly(way: str, team: int, teams: int, lanes: int) -> None:
    """Where no thread has more elements than another, statistics take one reduction; eight columns
    a token are read in aligned runs that repeat."""
    compare(built(3, 32, 256, 2), way, True, team, teams, lanes)


def compare(
    executors: list[Executor], way: str, shelf: bool, team: int, teams: int, lanes: int
) -> None:
    for executor in executors:
        for region in executor.plan.regions:
            if not isinstance(region, RowRegion):
                continue
            stages = layouts_of(region, team, lanes)
            schedule = Schedule(team, teams, stages, **WAYS[way])  # type: ignore[arg-type]
            if shelf:
                found = with_shelf(region, schedule)
                if found is None:
                    assert region.kind != "group"
                    continue
                schedule = found
            kernel = emit_rows(region, executor.plan.buffers, schedule, False, f"mf_{region.name}")
            module: Any = Emulated(kernel, by_block(region, schedule))
            expected = results(executor, executor.built[region.name])
            got = results(executor, BuiltRegion(region, kernel, module, 2))
            kept = {n.name for n in kernel.inside}
            assert got.keys() == expected.keys() - kept and got
            for name, value in got.items():
                error = (value - expected[name]).norm() / expected[name].norm()
                assert error < 2**-8, f"{region.name} {name} in the way {way}: {error:.1e}"


def test_rows_with_a_pitch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd rows that products read and write lie at multiples of 16 bytes."""
    rules = importlib.import_module("megafuse.passes.pitched")
    monkeypatch.setattr("megafuse.runtime.plans.has_epilogues", lambda *_: True)
    monkeypatch.setattr(rules, "SLOWER", 1e9)
    monkeypatch.setattr(rules, "LEAST_EXTENT", 1)
    monkeypatch.setattr(rules, "LEAST_RESULT", 1)
    case = block_case((3, 5, 35, 2), torch.bfloat16)
    compiled = megafuse.fuse(case.module).build(*case.args, **case.kwargs)
    assert compiled is not None and compiled.forward and compiled.backward
    pitched = 0
    for executor in (compiled.forward, compiled.backward):
        for region in executor.plan.regions:
            if not isinstance(region, RowRegion):
                continue
            touched = [*region.reads(executor.plan.buffers), *region.writes()]
            pitched += sum(n.room != n.shape for n in touched)
            stages = layouts_of(region, 32, 1)
            schedule = Schedule(32, 2, stages)
            kernel = emit_rows(region, executor.plan.buffers, schedule, False, f"mf_{region.name}")
            module: Any = Emulated(kernel, region.kind == "group")
            expected = results(executor, executor.built[region.name])
            got = results(executor, BuiltRegion(region, kernel, module, 2))
            for name, value in got.items():
                error = (value - expected[name]).norm() / expected[name].norm()
                assert error < 2**-8, f"{region.name} {name}: {error:.1e}"
    assert pitched > 6
