"""megafuse: turns a PyTorch subgraph into a few fused kernels, forward and backward, with proof."""

from megafuse.api import explain, fuse
from megafuse.config import Options
from megafuse.errors import MegafuseError
from megafuse.runtime.module import FusedModule

__version__ = "0.1.0"
__all__ = ["FusedModule", "MegafuseError", "Options", "check", "explain", "fuse"]


def __getattr__(name: str) -> object:
    if name == "check":  # rich and friends load only when they are used
        from megafuse.tools.check import check

        return check
    raise AttributeError(f"module 'megafuse' has no attribute {name!r}")
