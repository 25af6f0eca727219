"""Generated source with the tile header in front: what a compiler is given, in one text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

_TILE = Path(__file__).resolve().parent.parent / "codegen" / "tile"
_GUARD = "#ifndef MF_TILE_H"

Header = Literal["host.h", "cuda.cuh"]


@cache
def header(name: Header) -> str:
    """The header as one text, its own includes written out."""
    text = (_TILE / name).read_text(encoding="utf-8")
    for part in ("common.h", "ptx.cuh"):
        text = text.replace(f'#include "{part}"\n', (_TILE / part).read_text(encoding="utf-8"))
    return text


def assemble(source: str, name: Header) -> str:
    """`source` behind its header; untouched when it already carries one.

    Compilers and sanitizers then report line numbers of the generated source itself.
    """
    if _GUARD in source:
        return source
    return f'#line 1 "{name}"\n{header(name)}#line 1 "generated"\n{source}'
