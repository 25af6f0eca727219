"""MEGAFUSE_DUMP: every stage of one call, the generated source, and a script that repeats it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import REPOSITORY, block_case

import megafuse
from megafuse import Options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    case = block_case((3, 8, 72, 2))
    fused = megafuse.fuse(case.module, options=Options(dump=path))
    fused(*case.args).backward(case.grad_output)
    (plan,) = path.iterdir()  # one plan, one folder
    return plan


def test_every_stage_is_written(folder: Path) -> None:
    names = sorted(p.name for p in folder.iterdir() if p.name[:2].isdigit())
    stages = [name.split("-", 1)[1] for name in names if name.endswith(".py")]
    assert stages[:5] == ["capture.py", "dce.py", "simplify.py", "cse.py", "dce.py"]
    assert stages[5:] == ["in_memory.py", "partition.py", "partition.py"]
    for path in folder.rglob("*"):
        assert path.is_dir() or path.stat().st_size > 0, path
    text = (folder / names[0]).read_text()
    assert "def graph(" in text and "ffn.py:" in text


def test_generated_source_is_written(folder: Path) -> None:
    sources = [p for p in folder.rglob("*") if p.suffix in (".h", ".cpp", ".cc", ".cu", ".cuh")]
    text = "\n".join(p.read_text() for p in sources)
    for name in ("mf_F1", "mf_F3", "mf_F5", "mf_B1", "mf_B4", "mf_B7"):
        assert f"struct {name} " in text


def test_reproduction_runs(folder: Path) -> None:
    script = folder / "repro.py"
    assert script.is_file()
    paths = os.pathsep.join([str(REPOSITORY / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Options().dump is None
    monkeypatch.setenv("MEGAFUSE_DUMP", str(tmp_path / "deep" / "er"))
    megafuse.fuse(torch.nn.LayerNorm(8), torch.randn(2, 8))
    assert len(list((tmp_path / "deep" / "er").rglob("*.py"))) >= 6


def test_without_it_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    megafuse.fuse(torch.nn.LayerNorm(8), torch.randn(2, 8))
    assert not list(tmp_path.iterdir())
