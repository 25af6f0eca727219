"""Launching through the driver with everything prepared but addresses and stream."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

_CONFIG, _STREAM_AT = struct.Struct("=7I4x2QI4x"), 32  # CUlaunchConfig
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and that it is wanted.
_EARLY = ctypes.create_string_buffer(struct.pack("=I4xi60x", 6, 1), 72)
ALIGNMENT = 64
"""Of parameter structs: tensor maps ask for it."""

Grid = tuple[int, int, int]


def config(grid: Grid, block: int | Grid, shared: int, early: bool = False) -> bytes:
    """The driver's CUlaunchConfig, on the default stream. early: the kernel may start while the one
    before it on the stream still runs, for whose end it waits itself."""
    threads = (block, 1, 1) if isinstance(block, int) else block
    attributes = ctypes.addressof(_EARLY) if early else 0
    return _CONFIG.pack(*grid, *threads, shared, 0, attributes, int(early))


class Prepared:
    """One thread's launch of one kernel: room for its parameter struct at `address`, and the
    driver's arguments as the objects that ctypes need not convert.

    function: the kernel's handle. config: see `config`. size: bytes of the struct.
    """

    def __init__(self, function: ctypes.c_void_p, config: bytes, size: int) -> None:
        self._room = ctypes.create_string_buffer(size + ALIGNMENT - 1)
        start = -ctypes.addressof(self._room) % ALIGNMENT
        self.address = ctypes.addressof(self._room) + start
        self.args = memoryview(self._room)[start : start + size]
        launch_config = ctypes.create_string_buffer(config, len(config))
        self.stream = ctypes.c_void_p.from_buffer(launch_config, _STREAM_AT)
        # The kernel has one parameter, a struct passed by value: an array of one pointer.
        params = (ctypes.c_void_p * 1)(self.address)
        self.arguments = launch_config, function, params, ctypes.c_void_p()


@functools.cache
def entry_point(name: str) -> Any:
    """A function of the CUDA driver that answers with a status."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.restype = ctypes.c_int
    return function
