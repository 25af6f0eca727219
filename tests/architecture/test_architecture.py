"""Arrows between modules, and that the compiler knows no workload by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support import REPOSITORY

SOURCE = REPOSITORY / "src" / "megafuse"
FILES = sorted(SOURCE.rglob("*.py"))
ADAPTERS = {"workload.py", "subgraphs.py", "cli.py", "tools/cli_options.py", "tools/doctor.py"}


def imports(path: Path) -> set[str]:
    """Names of the modules that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(names: set[str], *prefixes: str) -> set[str]:
    return {n for n in names for p in prefixes if n == p or n.startswith(f"{p}.")}


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 40 and "megafuse.ir" in imports(SOURCE / "index.py")


def test_ir_imports_nothing_of_megafuse() -> None:
    assert not inside(imports(SOURCE / "ir.py"), "megafuse")


@pytest.mark.parametrize(
    "part, forbidden",
    [
        ("fusion", ["megafuse.codegen", "megafuse.runtime", "megafuse.tools", "megafuse.capture"]),
        ("codegen", ["megafuse.runtime", "megafuse.tools", "megafuse.capture", "megafuse.passes"]),
        ("passes", ["megafuse.fusion", "megafuse.codegen", "megafuse.runtime", "megafuse.capture"]),
        ("ops", ["megafuse.fusion", "megafuse.codegen", "megafuse.runtime", "megafuse.passes"]),
        ("runtime", ["megafuse.tools", "megafuse.workload", "megafuse.subgraphs", "megafuse.zoo"]),
    ],
)
def test_arrows(part: str, forbidden: list[str]) -> None:
    files = [f for f in FILES if f.relative_to(SOURCE).parts[0] == part]
    assert files
    wrong = {str(f.relative_to(SOURCE)): found for f in files
             if (found := inside(imports(f), *forbidden))}  # fmt: skip
    assert not wrong


def test_only_adapters_import_the_workload() -> None:
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if name not in ADAPTERS and not name.startswith("tools/"):
            assert not inside(imports(path), "megafuse.workload", "rank_mixer_src"), name


def test_no_compiler_file_names_the_workload() -> None:
    named = re.compile(r"rank_?mixer|nezha|dense_?p?ffn|research_topic", re.IGNORECASE)
    everything = [p for p in SOURCE.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert any(p.suffix == ".h" for p in everything)
    guilty = {str(p.relative_to(SOURCE)) for p in everything if named.search(p.read_text())}
    assert guilty <= ADAPTERS
    assert "workload.py" in guilty  # the pattern finds what it looks for
