"""bisect finds the fusion that a broken rule lets through, and names it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafuse
from megafuse import Options
from megafuse.fusion.rules import group, roles
from megafuse.ops import pointwise
from megafuse.subgraphs import FactorySubgraph, Settings
from megafuse.tools.bisect import bisect, first_bad
from megafuse.tools.candidate import Candidate

FILE = """
import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        h = self.norm(x)
        turned = h.transpose(1, 2)
        return torch.tanh(turned) * torch.softmax(turned, -1), h.sum((0, 1))


def factory():
    return Mixed(), (torch.randn(5, 24, 24, requires_grad=True),)
"""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        turned = h.transpose(1, 2)
        return torch.tanh(turned) * torch.softmax(turned, -1), h.sum((0, 1))


def factory() -> Any:
    return Mixed(), (torch.randn(5, 24, 24, requires_grad=True),)


def line_of(words: str) -> int:
    """The number of the line of `Mixed` that holds `words`."""
    lines = inspect.getsourcelines(Mixed)
    return lines[1] + next(i for i, line in enumerate(lines[0]) if words in line)


def candidate() -> Candidate:
    return Candidate(FactorySubgraph("mixed", factory, Settings()), Options())


def passes(fuel: int) -> bool:
    made = candidate()
    made.options = dataclasses.replace(made.options, fuel=fuel)
    return made.check(1).passed


@pytest.mark.parametrize("total", [1, 2, 3, 8, 13, 100])
def test_the_search(total: int) -> None:
    for bad in range(1, total + 1):
        asked: list[int] = []

        def judge(n: int, bad: int = bad, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n < bad

        assert first_bad(judge, total) == bad
        assert len(asked) <= total.bit_length() and all(0 < n < total for n in asked)


def test_nothing_to_find() -> None:
    finding = bisect(candidate())
    assert finding.passed and finding.bad is None and finding.total >= 8
    assert f"passes with all {finding.total} fusions" in str(finding)


def test_a_rule_that_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`roles` no longer sees that a softmax along tokens and a norm along features share no row."""
    monkeypatch.setattr(roles, "disagreement", lambda *_: None)
    finding = bisect(candidate())
    assert finding.bad is not None and finding.merge is not None and finding.clean
    assert passes(finding.bad - 1) and not passes(finding.bad)
    joined = {r.node.origin.op for side in (finding.merge.first, finding.merge.second)
              for r in side.roots if r.kind == "row"}  # fmt: skip
    assert {"aten.amax", "aten.sum"} <= joined
    text = str(finding)
    assert f"First bad: fusion {finding.bad} of {finding.total}, in forward" in text
    assert "fusion/rules/same_rows.py" in text
    norm, softmax = (line_of(words) for words in ("h = self.norm(x)", "torch.softmax(turned"))
    assert f"test_bisect.py:{norm} (norm): sum, div" in text
    assert f"test_bisect.py:{softmax}: amax" in text


def test_a_compiler_that_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty fusion makes planning itself fail."""
    real = roles.disagreement

    def faulty(*args: Any) -> str | None:
        if {"aten.amax", "aten.sum"} <= {r.node.origin.op for r in args[0]}:
            raise KeyError("axis")
        return real(*args)

    monkeypatch.setattr(roles, "disagreement", faulty)
    finding = bisect(candidate())
    assert finding.bad is not None and finding.probes[0].problems[0].startswith("KeyError")
    assert "with which the planner itself fails" in str(finding)


def test_a_fault_without_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(pointwise.TABLE["tanh"], cpp=pointwise.TABLE["exp"].cpp)
    monkeypatch.setitem(pointwise.TABLE, "tanh", wrong)
    finding = bisect(candidate())
    assert finding.bad is None and not finding.passed
    assert [p.fuel for p in finding.probes] == [finding.total, 0]
    assert "With none it fails too" in str(finding)


def test_the_groups_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuel counts forward's fusions, then backward's: every merge of a plan has its number."""
    x = torch.randn(3, 8, 32, requires_grad=True)

    def mix(x: Tensor) -> Tensor:
        h = torch.softmax(x, -1)
        return torch.softmax(h.reshape(3, 8, 8, 4).transpose(1, 2).reshape(3, 8, 32) + x, -1)

    called: list[int] = []
    real = group.add_stage
    monkeypatch.setattr(group, "add_stage", lambda *a: (called.append(1), real(*a))[1])
    plan = next(iter(megafuse.fuse(mix, x)._plans.values()))[0].plan
    assert called and any(len(m.result.stages) == 2 for m in plan.forward.merges)
    total = len(plan.forward.merges) + len(plan.backward.merges)
    for fuel in range(total + 1):
        fused = megafuse.fuse(mix, x, options=Options(fuel=fuel))
        limited = next(iter(fused._plans.values()))[0].plan
        first = min(fuel, len(plan.forward.merges))
        assert len(limited.forward.merges) == first
        assert len(limited.backward.merges) <= fuel - first


def test_command(
    megafuse_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    result = megafuse_command("bisect", f"{path}:factory")
    assert result.exit_code == 0 and "there is nothing to find" in result.output
    monkeypatch.setattr(roles, "disagreement", lambda *_: None)
    result = megafuse_command("bisect", f"{path}:factory")
    assert result.exit_code == 1
    assert "First bad: fusion" in result.output and "mine.py:14: amax" in result.output
