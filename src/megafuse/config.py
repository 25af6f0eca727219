"""Every option and environment variable, in one frozen dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megafuse.errors import OptionError


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else None


def _fuel() -> int | None:
    value = os.environ.get("MEGAFUSE_FUEL")
    if not value:
        return None
    if not value.strip().isdecimal():
        raise OptionError(f"MEGAFUSE_FUEL={value!r} is not a number of fusions: 0, 1, 2, ...")
    return int(value)


@dataclass(frozen=True)
class Options:
    """How to fuse. Frozen and hashable: part of the key under which a plan is kept.

    rounding: "fp32" keeps float32 inside a region and rounds where a value reaches memory;
        "eager" reproduces the cast at every operator boundary of eager PyTorch.
    memory: "balanced" keeps a value for backward when recomputing it would cost a store;
        "min" recomputes whatever is cheaper in bytes to recompute than to hold.
    executor: "auto" runs generated code (g++ for CPU tensors, NVRTC for CUDA tensors);
        "reference" interprets the plan in plain PyTorch.
    sanitize: build host code under the address and undefined-behaviour sanitizers.
    debug: bounds-checked and trap-on-fault builds of the generated code.
    serial: on a GPU no kernel starts before the one before it has ended (``MEGAFUSE_SERIAL``), for
        bisection and profiles.
    dump: directory for every stage of the pipeline (``MEGAFUSE_DUMP``); None writes nothing.
    fuel: stop merging regions after this many fusions (``MEGAFUSE_FUEL``), forward's first, for
        bisection.
    """

    rounding: Literal["fp32", "eager"] = "fp32"
    memory: Literal["balanced", "min"] = "balanced"
    executor: Literal["auto", "reference"] = "auto"
    sanitize: bool = False
    debug: bool = False
    serial: bool = field(default_factory=lambda: os.environ.get("MEGAFUSE_SERIAL", "0") != "0")
    dump: Path | None = field(default_factory=lambda: _path("MEGAFUSE_DUMP"))
    fuel: int | None = field(default_factory=_fuel)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("rounding", ("fp32", "eager")),
            ("memory", ("balanced", "min")),
            ("executor", ("auto", "reference")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"Options.{name} must be one of {allowed}, got {value!r}")
        if self.fuel is not None and (not isinstance(self.fuel, int) or self.fuel < 0):
            raise OptionError(f"Options.fuel must be a number of fusions, got {self.fuel!r}")


def cache_dir() -> Path:
    """Where built kernels are kept: ``MEGAFUSE_CACHE``, else the user's cache directory."""
    chosen = _path("MEGAFUSE_CACHE")
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megafuse"
    except RuntimeError:  # a user without a home directory: no folder, and the cache says so
        return Path(os.devnull) / "megafuse"
