"""What `megafuse calibrate` measured on this machine: one small JSON file a device, in the cache.

Plans rest on shapes and bytes; these rates only turn them into predicted times. The same file
therefore gives the same predictions, and none gives the defaults.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megafuse.config import cache_dir

VERSION = 1


@dataclass(frozen=True)
class Rates:
    """device: its name; date: ISO day; bandwidth, l2_bandwidth: bytes/s read plus written by a copy
    out of memory and out of cache; cache_bytes: how much counts as in cache; launch_seconds: of one
    launch of a generated kernel; matmul_rate: FLOP/s of a large product by dtype name."""

    device: str
    date: str
    bandwidth: float
    l2_bandwidth: float
    cache_bytes: int
    launch_seconds: float
    matmul_rate: dict[str, float]

    def __post_init__(self) -> None:
        numbers = (self.bandwidth, self.l2_bandwidth, self.launch_seconds,
                   *self.matmul_rate.values())  # fmt: skip
        if not all(math.isfinite(n) and n > 0 for n in numbers) or self.cache_bytes < 0:
            raise ValueError("every rate must be a positive number")

    def __hash__(self) -> int:
        return hash((self.device, self.date, self.bandwidth))

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def path_for(device: str) -> Path:
    """Where the rates of the device named `device` are kept."""
    return cache_dir() / "rates" / (re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-") + ".json")


def load(device: str) -> Rates | None:
    """The rates measured for `device`, or None. A file that is damaged counts as none, with one
    warning."""
    return _load(path_for(device), device)


@cache
def _load(path: Path, device: str) -> Rates | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        data = json.loads(text)
        if data.pop("version") != VERSION:
            raise ValueError("it was written by another version")
        rates = Rates(**data)
        if rates.device != device:
            raise ValueError(f"it is about {rates.device!r}")
        return rates
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"the measured rates in {path} are not usable ({error}); default rates are used. Run "
            "`megafuse calibrate` again.",
            stacklevel=2,
        )
        return None


def store(rates: Rates) -> Path:
    """Replaces the file for `rates.device` in one step. Raises OSError when that fails."""
    path = path_for(rates.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".rates-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(rates.to_json(), file, indent=2)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _load.cache_clear()
    return path
