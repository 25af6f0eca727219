"""MEGAFUSE_DUMP: every stage of the pipeline, the generated source and a reproduction, as files."""

from __future__ import annotations

from collections.abc import Callable

from megafuse.config import Options


def observer(options: Options) -> Callable[[str, str], None]:
    """Writes (name, text) under `options.dump`, or does nothing."""
    if options.dump is None:
        return lambda name, text: None
    folder = options.dump
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text)

    return write
