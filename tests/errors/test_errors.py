"""Every row of docs/errors.md happens as it says."""

from __future__ import annotations

import builtins
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import error_cases
import error_machines as machines
import pytest
import torch
from error_rows import CASES, Row, rows
from support import REPOSITORY
from torch.utils import _pytree as pytree

import megafuse
from megafuse import rates
from megafuse.runtime import cache

ROWS = rows()
assert error_cases and machines  # they register what is tested here


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> machines.Machine:
    """A machine of the test's own, without what an earlier one left in this process."""
    monkeypatch.setattr(cache, "_fallback", None)
    request.addfinalizer(rates._load.cache_clear)
    cache._warn_once.cache_clear()
    rates._load.cache_clear()
    return machines.Machine(tmp_path, monkeypatch)


def same(target: Any) -> Any:
    """In place of `megafuse.fuse`, for what eager does."""
    return target


def run(row: Row, machine: machines.Machine, fuse: Any) -> Any:
    given = {"fuse": fuse, "machine": machine}
    case = CASES[row.given]
    return case(**{name: given[name] for name in inspect.signature(case).parameters})


def test_the_table_and_the_cases_are_the_same() -> None:
    assert ROWS.keys() == CASES.keys() and len(ROWS) >= 60
    known = {n for n in dir(megafuse.errors) if n.endswith("Error")} | {"SubgraphError"}
    for row in ROWS.values():
        if not re.match(r"none|one UserWarning|eager's \w+Error|the error itself", row.raises):
            assert row.raises in known | {"ValueError"}, row
            assert row.says, row


@pytest.mark.parametrize("given", [g for g, r in ROWS.items() if r.raises == "none"])
def test_what_works(given: str, machine: machines.Machine) -> None:
    expected = run(ROWS[given], machine, same)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(ROWS[given], machine, megafuse.fuse)
    if all(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(got)):
        torch.testing.assert_close(got, expected)
    else:
        assert got == expected


@pytest.mark.parametrize("given", [g for g, r in ROWS.items() if r.raises.startswith("eager's")])
def test_eagers_own(given: str, machine: machines.Machine) -> None:
    row = ROWS[given]
    with pytest.raises(Exception) as eager:
        run(row, machine, same)
    with pytest.raises(Exception) as fused:
        run(row, machine, megafuse.fuse)
    assert eager.type.__name__ == row.raises.removeprefix("eager's ")
    assert fused.type is eager.type and str(fused.value) == str(eager.value)


@pytest.mark.parametrize("given", [g for g, r in ROWS.items() if r.raises.startswith("one ")])
def test_a_warning(given: str, machine: machines.Machine) -> None:
    row = ROWS[given]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(row, machine, megafuse.fuse)
    (only,) = [w for w in caught if "megafuse" in str(w.message) or "cache" in str(w.message)]
    assert only.category.__name__ == row.raises.removeprefix("one ")
    assert_says(row, str(only.message))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(row, machine, same) if row.given != "damaged measured rates" else got
    torch.testing.assert_close(got, expected)


NAMED = [g for g, r in ROWS.items() if re.fullmatch(r"\w+Error", r.raises)]


@pytest.mark.parametrize("given", NAMED)
def test_a_named_error(given: str, machine: machines.Machine) -> None:
    row = ROWS[given]
    with pytest.raises(Exception) as raised:
        run(row, machine, megafuse.fuse)
    assert getattr(raised.value, "named", raised.type.__name__) == row.raises
    assert_says(row, str(raised.value))
    for name in ("RuntimeError", "ValueError"):
        if f"also a {name}" in document_line(given):
            assert issubclass(raised.type, getattr(builtins, name))


def test_the_error_itself(machine: machines.Machine) -> None:
    row = ROWS["MEGAFUSE_TRACEBACK=1"]
    with pytest.raises(megafuse.MegafuseError) as raised:
        run(row, machine, megafuse.fuse)
    assert_says(row, str(raised.value))


def test_a_defect_of_ours_shows_its_traceback(machine: machines.Machine) -> None:
    own = Path(megafuse.errors.__file__).parent / "tools" / "explain.py"
    code = compile("def broken(*a, **k): return {}['ours']", str(own), "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    machine.patch.setattr(megafuse.tools.explain, "explain", scope["broken"])
    with pytest.raises(KeyError, match="ours"):
        machine.command("explain", "dense_ffn", "--shape", "3,4,16,2")


def document_line(given: str) -> str:
    text = (REPOSITORY / "docs" / "errors.md").read_text()
    return next(line for line in text.splitlines() if line.startswith(f"| {given} |"))


def assert_says(row: Row, message: str) -> None:
    for words in row.says:
        assert words in message, f"{words!r} is not in: {message}"
