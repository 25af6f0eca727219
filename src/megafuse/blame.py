"""Whose line an error comes from: the user's, a library's or our own. Imports no torch."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Literal

Owner = Literal["user", "megafuse", "library", "neutral"]

_OWN = f"{Path(__file__).parent}{os.sep}"
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = ("torch", "sympy", "click")


def _owner(filename: str) -> Owner:
    if filename.startswith("<"):
        return "neutral"
    if filename.startswith(_OWN):
        return "megafuse"
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        home = f"{Path(module.__file__).parent}{os.sep}" if module and module.__file__ else None
        if home and filename.startswith(home):
            return "library"
    if filename.startswith(_STANDARD) and not any(p in filename for p in _PACKAGES):
        return "neutral"
    return "user"


def _frames(error: BaseException) -> list[tuple[Owner, str]]:
    """(owner, "file:line") of each frame the error passed, outermost first."""
    found: list[tuple[Owner, str]] = []
    tb = error.__traceback__
    while tb is not None:
        filename = tb.tb_frame.f_code.co_filename
        found.append((_owner(filename), f"{filename}:{tb.tb_lineno}"))
        tb = tb.tb_next
    return found


def users_line(error: BaseException) -> str | None:
    """The innermost line of the user's that the error passed; of a SyntaxError the faulty one."""
    if isinstance(error, SyntaxError) and error.filename and _owner(error.filename) == "user":
        return f"{error.filename}:{error.lineno}"
    return next((place for owner, place in reversed(_frames(error)) if owner == "user"), None)


def raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised the error, rather than a library it called or us."""
    owners = [owner for owner, _ in _frames(error) if owner != "neutral"]
    return bool(owners) and owners[-1] == "user"


def met_in_users_code(error: BaseException) -> bool:
    """Whether the error arose in the user's code or in a library that it called, not in ours."""
    owners = [owner for owner, _ in _frames(error) if owner in ("user", "megafuse")]
    return bool(owners) and owners[-1] == "user"
