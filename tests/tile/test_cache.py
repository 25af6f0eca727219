"""What is built once is found again, whatever happened to the file in between."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from megafuse.errors import BuildError, ToolchainError
from megafuse.runtime import cache
from megafuse.runtime.host import build_host, find_compiler

SOURCE = """
struct one {
  struct Args { float* out; };
  MF_FN static void run(const mf::Finisher&, const Args& a) { *a.out = 1.f; }
};
MF_FINISH(one)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_fallback", None)
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


def test_builds_once(root: Path) -> None:
    builds: list[int] = []

    def build() -> bytes:
        builds.append(1)
        return b"machine code"

    path = cache.get_or_build(cache.digest("a", "b"), ".bin", build)
    assert cache.get_or_build(cache.digest("a", "b"), ".bin", build) == path
    assert cache.read(path) == b"machine code" and len(builds) == 1
    assert cache.digest("ab", "") != cache.digest("a", "b")
    assert not list(root.rglob(".building-*"))


@pytest.mark.parametrize("damage", [b"", b"short", "truncate", "flip"])
def test_a_damaged_entry_is_built_again(root: Path, damage: bytes | str) -> None:
    path = cache.get_or_build("k" * 64, ".bin", lambda: b"right" * 100)
    data = path.read_bytes()
    if damage == "truncate":
        damage = data[:-1]
    elif damage == "flip":
        damage = data[:7] + bytes([data[7] ^ 1]) + data[8:]
    assert isinstance(damage, bytes)
    path.write_bytes(damage)
    assert cache.read(path) is None
    path = cache.get_or_build("k" * 64, ".bin", lambda: b"right" * 100)
    assert cache.read(path) == b"right" * 100


def test_an_entry_that_does_not_load_is_built_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
        return cache.rebuild(key, suffix, lambda: b"whole, but no library")

    monkeypatch.setattr(cache, "get_or_build", spoil)
    module = build_host(SOURCE, ["one"])
    out = ctypes.c_float()
    module.launch("one", [ctypes.addressof(out)])
    assert out.value == 1 and (cache.read(module.path) or b"").startswith(b"\x7fELF")


def test_without_a_writable_directory_it_says_so_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="MEGAFUSE_CACHE") as caught:
        path = cache.get_or_build("k" * 64, ".bin", lambda: b"x")
    assert len(caught) == 1 and cache.read(path) == b"x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build("k" * 64, ".bin", lambda: b"not called") == path
        assert cache.read(cache.get_or_build("m" * 64, ".bin", lambda: b"y")) == b"y"


def test_processes_that_build_at_once_agree(root: Path) -> None:
    script = f"""
import ctypes
from megafuse.runtime.host import build_host
out = ctypes.c_float()
for _ in range(2):
    build_host({SOURCE!r}, ["one"]).launch("one", [ctypes.addressof(out)])
print(out.value)
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert out == "1.0\n", err
    assert len(list(root.rglob("*.so"))) == 1 and not list(root.rglob(".building-*"))


def test_a_missing_compiler_says_which_package_brings_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(ToolchainError, match=r"no-such-compiler.*package g\+\+"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match=r"No C\+\+ compiler was found"):
        build_host(SOURCE, ["one"])


def test_a_compile_error_carries_the_compilers_words(root: Path) -> None:
    with pytest.raises(BuildError, match=r"generated:2:9: error: .*nonsense"):
        build_host("// first\nint x = nonsense;\n", [])
    assert not list(root.rglob("*.so"))
