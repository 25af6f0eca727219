"""A directory of built artefacts, keyed by everything that went into them.

An entry is the artefact followed by a trailer (checksum, length, magic). ELF loaders ignore what
follows the file they describe, so a shared library is loaded straight from its entry. Entries
appear by ``os.replace``: a reader sees a whole entry or none, however many processes build at once.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from megafuse.config import cache_dir

_MAGIC = b"mfcache1"
_TRAILER = 32 + 8 + len(_MAGIC)


def digest(*parts: str | bytes) -> str:
    """The key of an artefact made from `parts`; where one part ends and the next begins counts."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def read(path: Path) -> bytes | None:
    """The artefact in `path`, or None when there is none or it is not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    return body if trailer == _trailer(body) else None


def get_or_build(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """The path of a whole entry for `key`, built and stored if there is none yet."""
    path = _entry(cache_dir(), key, suffix)
    if read(path) is not None:
        return path
    spare = _fallback_entry(key, suffix)
    if spare is not None and read(spare) is not None:
        return spare
    return _store(path, key, suffix, build())


def rebuild(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """Replaces an entry that is whole but unusable, such as a library that does not load."""
    return _store(_entry(cache_dir(), key, suffix), key, suffix, build())


def _entry(root: Path, key: str, suffix: str) -> Path:
    return root / key[:2] / f"{key[2:]}{suffix}"


def _trailer(body: bytes) -> bytes:
    return hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + _MAGIC


def _store(path: Path, key: str, suffix: str, body: bytes) -> Path:
    try:
        return _write(path, body)
    except OSError as error:
        path = _entry(_fallback_root(str(cache_dir()), str(error)), key, suffix)
        return _write(path, body)


def _write(path: Path, body: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".building-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + _trailer(body))
        os.chmod(temporary, 0o700)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


_fallback: Path | None = None


def _fallback_entry(key: str, suffix: str) -> Path | None:
    return _entry(_fallback, key, suffix) if _fallback is not None else None


@functools.cache
def _warn_once(directory: str, reason: str) -> None:
    warnings.warn(
        f"the kernel cache {directory} cannot be written ({reason}); kernels built now are kept "
        "for this process only. Set MEGAFUSE_CACHE to a writable directory.",
        stacklevel=2,
    )


def _fallback_root(directory: str, reason: str) -> Path:
    """A directory of this process, for when the cache cannot be written; says so once."""
    global _fallback
    if _fallback is None:
        _fallback = Path(tempfile.mkdtemp(prefix="megafuse-"))
        atexit.register(shutil.rmtree, _fallback, ignore_errors=True)
        _warn_once(directory, reason)
    return _fallback
