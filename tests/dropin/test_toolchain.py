"""The kernel cache and the compiler, seen from a call: right values, and words where they help."""

from __future__ import annotations

import locale
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
import torch
from parity import agree, draw, seeded

import megafuse
from megafuse.errors import BuildError, ToolchainError
from megafuse.runtime import cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAFUSE_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def build(start: object, results: object) -> None:
    torch.set_num_threads(1)
    start.wait()  # type: ignore[attr-defined]
    fused = megafuse.fuse(seeded())
    results.put(fused(draw(4, 6)).tolist())  # type: ignore[attr-defined]


def test_processes_that_build_the_same_kernels_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=build, args=(start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    got = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert got[0] == got[1] == got[2]
    torch.testing.assert_close(torch.tensor(got[0]), seeded()(draw(4, 6)).detach())
    entries = [p for p in folder.rglob("*") if p.is_file()]
    assert entries and all(cache.read(p) is not None for p in entries)


def test_a_damaged_entry_is_built_again(folder: Path) -> None:
    net = seeded()
    agree(net, draw(4, 6))
    entries = [p for p in folder.rglob("*") if p.is_file()]
    assert entries
    for i, path in enumerate(entries):
        data = path.read_bytes()
        path.unlink()  # a library in use is replaced, never written
        path.write_bytes(data[: len(data) // 2] if i % 2 else b"\0" * len(data))
    agree(net, draw(4, 6))
    assert all(cache.read(p) is not None for p in entries)


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("MEGAFUSE_CACHE", str(blocked / "kernels"))
    monkeypatch.setattr(cache, "_fallback", None)
    cache._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="MEGAFUSE_CACHE") as said:
        agree(seeded(), draw(4, 6))
        agree(torch.tanh, draw(4, 6))
    assert len([w for w in said if "MEGAFUSE_CACHE" in str(w.message)]) == 1
    monkeypatch.setattr(cache, "_fallback", None)


def test_a_missing_cache_directory_is_made(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(torch.tanh, draw(4, 6))
    assert folder.is_dir()


def test_a_missing_compiler_names_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    fused = megafuse.fuse(seeded())
    x = draw(4, 6)
    with pytest.raises(ToolchainError, match="g\\+\\+"):
        fused(x)
    monkeypatch.setenv("PATH", os.defpath)
    agree(fused.original, x, fused=fused)  # installed meanwhile


def test_compilers_words_are_read_in_any_locale(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries set the process's locale to C; compilers go on quoting in UTF-8."""
    compiler = tmp_path / "compiler"
    quoted = r"\342\200\230nonsense\342\200\231"
    compiler.write_text(f"#!/bin/sh\nprintf '{quoted}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "C")
        with pytest.raises(BuildError, match="‘nonsense’"):
            megafuse.fuse(torch.tanh)(draw(4, 6))
    finally:
        locale.setlocale(locale.LC_ALL, before)
