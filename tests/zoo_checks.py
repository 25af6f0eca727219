"""How the zoo's tests read a report."""

from __future__ import annotations

import math

from megafuse.tools.check_report import CheckReport

FEW = 256
"""The error of a smaller tensor is too small a sample: eager's own varies by a half or more."""


def missed(report: CheckReport) -> list[str]:
    """Tensors past their limits; one of a few elements must be past twice its limit."""
    found = [text for stage in report.stages for text in stage.findings if "note:" not in text]
    for stage in report.stages:
        for v in stage.tensors:
            if v.passed:
                continue
            past = max(v.error / v.error_limit, v.max_error / v.max_limit)
            measured = all("error" in p for p in v.problems)
            if not measured or math.prod(v.shape) >= FEW or past > 2:
                found.append(f"{stage.dtype} {v.name}: {'; '.join(v.problems)}")
    return found
