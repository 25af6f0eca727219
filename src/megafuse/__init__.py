"""megafuse: turns a PyTorch subgraph into a few fused kernels, forward and backward, with proof."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafuse.api import explain, fuse
    from megafuse.config import Options
    from megafuse.dynamo.compile import Backend, backend
    from megafuse.errors import MegafuseError
    from megafuse.runtime.module import FusedModule
    from megafuse.tools.check import check

__version__ = "0.1.0"
__all__ = [
    "Backend", "FusedModule", "MegafuseError", "Options", "backend", "check", "explain", "fuse",
]  # fmt: skip

_HOME = {
    "explain": "megafuse.api",
    "fuse": "megafuse.api",
    "Options": "megafuse.config",
    "Backend": "megafuse.dynamo",
    "backend": "megafuse.dynamo",
    "MegafuseError": "megafuse.errors",
    "FusedModule": "megafuse.runtime.module",
    "check": "megafuse.tools.check",
}


def __getattr__(name: str) -> object:
    """Load on first use, so that `megafuse --help` does not wait for torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'megafuse' has no attribute {name!r}")


if "torch._dynamo.backends.registry" in sys.modules:  # else its entry point names the backend
    importlib.import_module("megafuse.dynamo")
