"""A run of launches in one native call, where a C++ compiler is there to build it.

What Python does for a launch costs more than the driver's own share. ``tile/enqueue.h`` does the
same from an array made once: it copies the parameters, fills in addresses and launches.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.errors import BuildError, ToolchainError
from megafuse.runtime import cuda
from megafuse.runtime.host import build_host
from megafuse.runtime.launch import entry_point
from megafuse.runtime.source import TILE

MOST_BYTES = 4096
"""Of one kernel's parameters; the driver's limit."""

_LAUNCH, _PATCH, _QUEUE = struct.Struct("=56s5q"), struct.Struct("=4q"), struct.Struct("=4q")


@dataclass(frozen=True)
class Patch:
    """Byte `at` of the parameters takes the address `start` bytes into `buffer`; with `map` the
    tensor map that lies there does."""

    at: int
    buffer: Any
    start: int = 0
    map: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch but for its addresses. what: it and its size, for messages. function: the
    kernel's handle. config: see `launch.config`. args: its parameters."""

    what: str
    function: int
    config: bytes
    args: bytes
    patches: tuple[Patch, ...]


Place = Callable[[Any], tuple[int, int]]


class Queue:
    """Launches that follow one another on a stream."""

    def __init__(self, launches: Sequence[Launch], place: Place, target: Target) -> None:
        """place: of a buffer, which of the addresses given to `run` it lies at, and how far in."""
        self._what = [launch.what for launch in launches]
        self._target = target
        self._held: list[Any] = []
        records = []
        for launch in launches:
            if len(launch.args) > MOST_BYTES:
                raise BuildError(f"{launch.what} takes {len(launch.args)} bytes of parameters")
            patches = b""
            for patch in launch.patches:
                slot, offset = place(patch.buffer)
                patches += _PATCH.pack(patch.at, slot, offset + patch.start, patch.map)
            args, count = self._keep(launch.args), len(launch.patches)
            records.append(_LAUNCH.pack(launch.config, launch.function, args, len(launch.args),
                                        self._keep(patches), count))  # fmt: skip
        array = self._keep(b"".join(records))
        head = _QUEUE.pack(array, len(launches), target.launch, target.readdress)
        self._queue = ctypes.c_void_p(self._keep(head))
        self._enqueue = target.enqueue

    def _keep(self, data: bytes) -> int:
        """The address of a copy that lives as long as this queue."""
        self._held.append(ctypes.create_string_buffer(data, max(len(data), 1)))
        return ctypes.addressof(self._held[-1])

    def run(self, addresses: bytes, stream: int) -> None:
        """addresses: as 8-byte integers. Raises DriverError, naming the launch that was refused."""
        failed = self._enqueue(self._queue, 0, addresses, stream)
        if failed and failed & 0xFFFFFFFF == cuda.INVALID_CONTEXT:
            # A thread that has not yet touched CUDA, as autograd's workers may be.
            self._target.make_current()
            failed = self._enqueue(self._queue, failed >> 32, addresses, stream)
        if failed:
            reason = cuda._reason(failed & 0xFFFFFFFF)
            raise cuda.DriverError(f"launching {self._what[failed >> 32]} failed: {reason}")


@dataclass(frozen=True)
class Target:
    """Where launches go: the native loop, the functions it calls, and how a thread that the
    driver does not know is made known."""

    enqueue: Any
    launch: int
    readdress: int
    make_current: Callable[[], None]


def on_host() -> Target | None:
    """Kernels of the host, which run before the call returns; None without a C++ compiler."""
    library = _library()
    if library is None:
        return None
    return Target(library.mf_enqueue, _address(library.mf_call), 0, lambda: None)


def on_cuda(device: int) -> Target | None:
    """A CUDA device's current stream; None without a C++ compiler on this machine."""
    library = _library()
    if library is None:
        return None
    launch, readdress = map(entry_point, ("cuLaunchKernelEx", "cuTensorMapReplaceAddress"))
    return Target(library.mf_enqueue, _address(launch), _address(readdress),
                  lambda: cuda.make_current(device))  # fmt: skip


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _library() -> Any:
    source = (TILE / "enqueue.h").read_text(encoding="utf-8")
    try:
        path = build_host(source, ["mf_enqueue", "mf_call"]).path
    except (ToolchainError, BuildError):
        return None
    library = ctypes.CDLL(str(path))
    library.mf_enqueue.restype = ctypes.c_longlong
    library.mf_enqueue.argtypes = [
        ctypes.c_void_p, ctypes.c_longlong, ctypes.c_char_p, ctypes.c_void_p
    ]  # fmt: skip
    return library
