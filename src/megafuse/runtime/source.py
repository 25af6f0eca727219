"""Generated source with the tile header in front: what a compiler is given, in one text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

TILE = Path(__file__).resolve().parent.parent / "codegen" / "tile"
_GUARD = "#ifndef MF_TILE_H"

Header = Literal["host.h", "cuda.cuh"]


_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.M)


@cache
def header(name: Header, ptx: str | None = None) -> str:
    """The header as one text, its own includes written out. ptx: stands in for ptx.cuh."""

    def part(match: re.Match[str]) -> str:
        if match[1] == "ptx.cuh" and ptx is not None:
            return ptx
        return (TILE / match[1]).read_text(encoding="utf-8")

    return _INCLUDE.sub(part, (TILE / name).read_text(encoding="utf-8"))


def assemble(source: str, name: Header) -> str:
    """`source` behind its header; untouched when it already carries one.

    Compilers and sanitizers then report line numbers of the generated source itself.
    """
    if _GUARD in source:
        return source
    return f'#line 1 "{name}"\n{header(name)}#line 1 "generated"\n{source}'
