"""The tables of docs/errors.md, and the cases that prove their rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support import REPOSITORY

Case = Callable[..., Any]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Row:
    """given: a case's name; raises: an error's name, "eager's NAME", "one NAME" for a warning, or
    "none"; says: what is in the message."""

    given: str
    raises: str
    says: tuple[str, ...]


class Said(Exception):
    """What a command said on its way out: `named` is the error it named."""

    def __init__(self, named: str, text: str) -> None:
        super().__init__(text)
        self.named = named


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in (REPOSITORY / "docs" / "errors.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("given", "---"):
            continue
        given, raises, says = cells
        assert given not in found, given
        found[given] = Row(given, raises, tuple(re.findall(r"`([^`]+)`", says)))
    return found


def row(given: str) -> Callable[[Case], Case]:
    """Registers a case. It gets `fuse` and `machine` by name where it asks for them: `fuse` is
    `megafuse.fuse`, and the identity when eager's own outcome is wanted."""

    def add(case: Case) -> Case:
        assert given not in CASES, given
        CASES[given] = case
        return case

    return add
