"""Environments and commands that go wrong: the other tables of docs/errors.md."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from error_cases import Net, sample
from error_rows import Said, row
from support import REPOSITORY

import megafuse
from megafuse import Options, rates
from megafuse.cli import main
from megafuse.device import cpu_name, spec_for
from megafuse.runtime import cache, cuda

Fuse = Callable[[Any], Any]


@dataclass
class Machine:
    """folder: an empty one; patch: undone afterwards."""

    folder: Path
    patch: pytest.MonkeyPatch

    def env(self, name: str, value: object) -> None:
        self.patch.setenv(name, str(value))

    def file(self, name: str, text: str = "") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def inside_a_file(self, name: str) -> Path:
        """A path that nobody can write, root included."""
        return self.file("file") / name

    def command(self, *words: object) -> str:
        """Runs a command; raises Said for the one line it ends with."""
        result = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
        if result.exit_code != 2:
            return result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("megafuse: ") and "Traceback" not in line
        named, _, text = line.removeprefix("megafuse: ").partition(":")
        raise Said(named.split(" at ")[0], f"{named}:{text}")

    def check(self, text: str, factory: str = "factory") -> str:
        return self.command("check", f"{self.file('mine.py', text)}:{factory}", "--seeds", 1)


def forward(fuse: Fuse) -> Any:
    return fuse(Net())(sample(5, 12))


# -- environment


@row("MEGAFUSE_FUEL=abc")
def _(machine: Machine) -> Any:
    machine.env("MEGAFUSE_FUEL", "abc")
    return Options()


@row("MEGAFUSE_DUMP that cannot be written")
def _(machine: Machine) -> Any:
    machine.env("MEGAFUSE_DUMP", machine.inside_a_file("dump"))
    return forward(megafuse.fuse)


@row("MEGAFUSE_CACHE that cannot be written")
def _(machine: Machine, fuse: Fuse) -> Any:
    machine.env("MEGAFUSE_CACHE", machine.inside_a_file("cache"))
    return [forward(fuse), forward(fuse)]


@row("a user without a home directory")
def _(machine: Machine, fuse: Fuse) -> Any:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    machine.patch.delenv("MEGAFUSE_CACHE", raising=False)
    machine.env("XDG_CACHE_HOME", "")
    machine.patch.setattr(Path, "home", nowhere)
    return forward(fuse)


@row("a cache directory that does not exist")
def _(machine: Machine, fuse: Fuse) -> Any:
    machine.env("MEGAFUSE_CACHE", machine.folder / "deep" / "er")
    return forward(fuse)


@row("a damaged cache entry")
def _(machine: Machine, fuse: Fuse) -> Any:
    machine.env("MEGAFUSE_CACHE", machine.folder)
    forward(megafuse.fuse)
    entries = list(machine.folder.rglob("*.so"))
    assert entries
    for path in entries:
        whole = path.read_bytes()
        path.unlink()  # the library in use keeps its own file
        path.write_bytes(whole[: len(whole) // 2])
    result = forward(fuse)
    assert fuse is not megafuse.fuse or all(cache.read(path) is not None for path in entries)
    return result


@row("two processes that build the same kernel at once")
def _(machine: Machine, fuse: Fuse) -> Any:
    root = machine.folder / "cache"
    machine.env("MEGAFUSE_CACHE", root)
    machine.env("PYTHONPATH", ":".join([str(REPOSITORY / "tests" / "errors"), *sys.path]))
    script = (
        "import torch, megafuse; from error_cases import Net, sample; torch.set_num_threads(1);"
        "print(megafuse.fuse(Net())(sample(5, 12)).double().sum().item())"
    )
    if fuse is not megafuse.fuse:
        return round(forward(fuse).double().sum().item(), 4)
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=200)[0] for process in both}
    assert all(process.returncode == 0 for process in both) and len(said) == 1
    left = [p for p in root.rglob("*") if p.is_file()]
    assert left and all(cache.read(p) is not None for p in left)
    return round(float(said.pop()), 4)


@row("damaged measured rates")
def _(machine: Machine) -> Any:
    machine.env("MEGAFUSE_CACHE", machine.folder)
    path = rates.path_for(cpu_name())
    path.parent.mkdir()
    path.write_text("{")
    return spec_for(torch.device("cpu")).bandwidth


@row("no C++ compiler")
def _(machine: Machine) -> Any:
    machine.patch.delenv("CXX", raising=False)
    machine.env("PATH", machine.folder)
    return forward(megafuse.fuse)


@row("CXX that names no program")
def _(machine: Machine) -> Any:
    machine.env("CXX", "no-such-compiler")
    return forward(megafuse.fuse)


@row("a compiler that fails")
def _(machine: Machine) -> Any:
    machine.env("CXX", "false")
    return forward(megafuse.fuse)


@row("a compiler that writes nothing")
def _(machine: Machine) -> Any:
    machine.env("CXX", "true")
    return forward(megafuse.fuse)


@row("no cuda-bindings")
def _(machine: Machine) -> Any:
    machine.patch.setitem(sys.modules, "cuda.bindings", None)
    return cuda._bindings.__wrapped__()


# -- commands


@row("an unknown subgraph")
def _(machine: Machine) -> Any:
    return machine.command("check", "nonsense")


@row("a file that does not exist")
def _(machine: Machine) -> Any:
    return machine.command("explain", machine.folder / "nowhere.py:factory")


@row("a file without a function's name")
def _(machine: Machine) -> Any:
    return machine.command("explain", machine.file("mine.py"))


@row("a function that is not there")
def _(machine: Machine) -> Any:
    return machine.check("def factory(): ...\n", "other")


@row("a file that does not parse")
def _(machine: Machine) -> Any:
    return machine.check("import torch\ndef factory(:\n")


@row("a file that raises when imported")
def _(machine: Machine) -> Any:
    return machine.check("import torch\n\nwidth = 1 / 0\n")


@row("a factory that raises")
def _(machine: Machine) -> Any:
    return machine.check("import torch\n\n\ndef factory():\n    return {}['width']\n")


@row("a factory that returns something else")
def _(machine: Machine) -> Any:
    return machine.check("def factory():\n    return 1, 2, 3\n")


@row("a factory without a module")
def _(machine: Machine) -> Any:
    return machine.check("def factory():\n    return 1, 2\n")


@row("a module that raises")
def _(machine: Machine) -> Any:
    return machine.check(
        "import torch\nfrom torch import nn\n\n\nclass Strict(nn.Module):\n"
        "    def forward(self, x):\n        if x.dim() != 2:\n"
        "            raise ValueError('two dimensions, please')\n\n\n"
        "def factory():\n    return Strict(), torch.ones(2, 3, 4)\n"
    )


@row("a program file that is none")
def _(machine: Machine) -> Any:
    return machine.command("check", machine.file("program.pt2", "no zip archive"))


@row("MEGAFUSE_FUEL=abc before a command")
def _(machine: Machine) -> Any:
    machine.env("MEGAFUSE_FUEL", "abc")
    return machine.command("explain", "dense_ffn", "--shape", "3,4,16,2")


@row("a results file that cannot be written")
def _(machine: Machine) -> Any:
    from megafuse.tools import calibrate

    found = rates.Rates("here", "2026-01-02", 1.0, 1.0, 0, 1.0, {})
    machine.patch.setattr(calibrate, "calibrate", lambda *_: (found, machine.folder))
    where = machine.inside_a_file("rates.json")
    return machine.command("calibrate", "--device", "cpu", "--json", where)


@row("a page that cannot be written")
def _(machine: Machine) -> Any:
    page = machine.inside_a_file("plan.html")
    return machine.command("explain", "dense_ffn", "--shape", "3,4,16,2", "--html", page)


@row("a GPU where there is none")
def _(machine: Machine) -> Any:
    machine.patch.setattr(torch.cuda, "is_available", lambda: False)
    return machine.command("check", "--device", "cuda")


@row("MEGAFUSE_TRACEBACK=1")
def _(machine: Machine) -> Any:
    machine.env("MEGAFUSE_TRACEBACK", "1")
    return machine.command("check", "nonsense")
