"""Named errors. Each says what went wrong, where in the user's code, and what to do about it."""

from __future__ import annotations


class MegafuseError(Exception):
    """Base of every error megafuse raises on purpose."""


class CaptureError(MegafuseError, RuntimeError):
    """The subgraph could not be traced into one forward + backward graph.

    Also a RuntimeError: what eager raises for wrong shapes and dtypes, and what callers catch.

    own: the error that the user's own code raised meanwhile, if that is the reason: callers of the
        fused module get it as they would in eager.
    """

    own: Exception | None = None


class UnsupportedError(MegafuseError):
    """The subgraph was traced, but holds something megafuse refuses rather than gets wrong."""


class InvariantError(MegafuseError):
    """A pass or the planner produced an illegal Graph or Plan: a defect of megafuse itself."""


class BuildError(MegafuseError):
    """Generated source did not compile; the message holds the compiler's own words."""


class ToolchainError(MegafuseError):
    """A compiler or driver is missing; the message says which package brings it."""


class InputError(MegafuseError):
    """A call's arguments do not fit the fused module; raised before anything is launched."""


class DoubleBackwardError(MegafuseError):
    """Gradients of gradients were asked for; the fused module computes first derivatives only."""


class OptionError(MegafuseError, ValueError):
    """An option or environment variable has a value it cannot have."""


class OutputError(MegafuseError):
    """A file or folder that the caller asked to be written cannot be; the message names it."""


class FallbackWarning(UserWarning):
    """A call runs the original module, because only PyTorch itself can serve it."""
