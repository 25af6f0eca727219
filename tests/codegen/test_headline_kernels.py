"""The headline plans' kernels compile for sm_90a, without register spills, on any machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cuda12 or cuda13")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compile_headline as headline


@pytest.mark.parametrize("case", headline.CASES, ids=headline.case_name)
def test_compiles_without_spills(case: headline.Case) -> None:
    lines = headline.compile_case(case)
    regions = {line.kernel.removeprefix("mf_") for line in lines}
    assert regions >= {"F1", "F3", "F5", "B1", "B4", "B7"}
    assert not [f"{line.key}: {line.spills} bytes" for line in headline.unwaived(lines)]


def test_every_waiver_gives_a_reason() -> None:
    names = {headline.case_name(case) for case in headline.CASES}
    for key, reason in headline.WAIVED.items():
        assert key.rpartition(" ")[0] in names and reason.strip()
