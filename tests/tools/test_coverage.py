"""The coverage table: figures from plans on meta tensors, speeds from a file of samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megafuse import zoo
from megafuse.cli import main
from megafuse.subgraphs import Settings, load
from megafuse.tools.coverage import LEAST_SHARE, cover, document, medians, run, share


def record(ours: float, eager: float, compiled: float | None) -> dict[str, object]:
    times = {"megafuse": ours, "eager": eager}
    if compiled is not None:
        times["torch.compile"] = compiled
    return {
        "candidates": {k: {"time": {"median": v, "raw": [v]}} for k, v in times.items()},
        "environment": {"gpu": {"name": "a GPU"}},
    }


def test_rotary_moves_each_tensor_once() -> None:
    row = cover("rotary", "not measured")
    b, h, t, d = 8, 32, 2048, 128
    tensors, table = 2 * b * h * t * d, t * d
    # q, k and their gradients read and written once; the two tables read by each of four regions
    assert row.after == 2 * (4 * tensors + 8 * table)
    assert row.regions == {"rows": 4} and row.operators > 12
    assert row.before > 4 * row.after and row.share == 1.0


def test_what_is_not_fused_is_said() -> None:
    """Products and table look-ups count on neither side; a lone copy counts as unfused."""
    row = cover("dlrm_top", "not measured")
    assert 0 < row.unfused < row.elementwise < row.before
    assert row.regions["matmul"] > 0 and 0 < row.share < 1
    assert share([row]) == row.share


def test_nine_tenths_of_the_zoos_bytes_lie_in_fused_regions() -> None:
    rows = [cover(name, "not measured") for name in zoo.ENTRIES]
    assert share(rows) >= LEAST_SHARE
    assert all(row.after < row.before for row in rows)
    worst = min(rows, key=lambda r: r.share)
    assert worst.share > 0.5, worst


def test_speeds_come_from_the_file(tmp_path: Path) -> None:
    row = cover("film", medians(record(2.0, 5.0, 3.0)))
    assert "| 5.00 | 2.00 | 2.50 | 1.50 |" in document([row], "measured on a GPU")
    row = cover("film", medians(record(2.0, 5.0, None)))
    assert "| 5.00 | 2.00 | 2.50 | - |" in document([row], "measured on a GPU")
    assert medians(None) == "not measured"
    assert medians({"failed": ["d x: relative error"]}) == "failed its check"

    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"entries": {"film": record(2.0, 5.0, 3.0)}}))
    if torch.cuda.is_available():
        return  # it would be measured again
    text, enough = run(["film"], path, 3, 1, lambda *_: None)
    assert enough and "measured on a GPU" in text and "2.50" in text


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "coverage.md"
    result = CliRunner().invoke(main, ["coverage", "--only", "film", "--out", str(path)])
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "| film |" in text and "- `film`: " in text and "not measured" in text
    result = CliRunner().invoke(main, ["coverage", "--only", "nothing"])
    assert result.exit_code == 2 and "the zoo has no 'nothing'" in result.output


def test_the_other_commands_take_entries_too() -> None:
    case = load("zoo:film", Settings(dtype=torch.bfloat16)).case(1)
    assert case.args[0].dtype == torch.bfloat16 and case.args[0].requires_grad
    again = load("zoo:film", Settings(dtype=torch.bfloat16)).case(1)
    assert torch.equal(case.args[0], again.args[0])
    with pytest.raises(Exception, match="the zoo has no 'nothing'"):
        load("zoo:nothing", Settings())
