"""Generated source on an NVIDIA GPU: compiled by NVRTC, loaded and launched through the driver.

Compiling needs no GPU. ``cuda-bindings`` (12.x or 13.x) calls NVRTC and loads modules; the launch
itself goes through ctypes, where everything but the arguments is prepared once per kernel.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megafuse.errors import BuildError, MegafuseError, ToolchainError
from megafuse.runtime import cache
from megafuse.runtime.launch import Grid, Prepared, config, entry_point
from megafuse.runtime.source import assemble

INVALID_CONTEXT = 201


class DriverError(MegafuseError):
    """The CUDA driver refused a call; the message holds its own name for the reason."""


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes from a multiprocessor, as the assembler reports it."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, with the compiler's log and each kernel's resources."""

    image: bytes
    log: str
    resources: dict[str, KernelResources]


def compile_cubin(
    source: str,
    names: Sequence[str],
    arch: str,
    *,
    fast: bool = False,
    wide: bool = False,
    debug: bool = False,
) -> Cubin:
    """Compiles `source` for `arch` ("sm_90a"), or finds it in the cache. Needs no GPU.

    fast: every stored tensor is 16 bits wide, so approximate exp and division do (``MF_FAST``).
    wide: computes in double, for small problems in float32 (``MF_WIDE``); never with `fast`.
    debug: line numbers for profilers and sanitizers, and ``MF_DEBUG``.
    """
    if fast and wide:
        raise ValueError("fast and wide exclude each other")
    text = assemble(source, "cuda.cuh")
    flags = [f"--gpu-architecture={arch}", "-std=c++17", "--ptxas-options=-v", "-default-device"]
    if fast:
        flags.append("-DMF_FAST=1")
    if wide:
        flags.append("-DMF_WIDE=1")
    if debug:
        flags += ["-lineinfo", "-DMF_DEBUG=1"]
    if _nvrtc_version() >= (12, 9):
        # NVRTC's own cache writes where nobody asked, and what comes out of it brings no report of
        # the assembler's.
        flags.append("--no-cache")
    key = cache.digest("cuda", text, "\0".join(flags), repr(_nvrtc_version()))

    def build() -> bytes:
        image, log = _nvrtc_compile(text, flags)
        cubin = Cubin(image, log, _parse_resources(log))
        missing = [name for name in names if name not in cubin.resources]
        if missing:
            raise BuildError(f"the compiled source has no kernel {', '.join(missing)}:\n{log}")
        return _pack(cubin)

    path = cache.get_or_build(key, ".cubin", build)
    data = cache.read(path)
    return _unpack(data if data is not None else build())


class CudaModule:
    """Loaded kernels of one device."""

    def __init__(
        self, cubin: Cubin, names: Sequence[str], device: int, shared: Mapping[str, int] = {},
        serial: bool = False,
    ) -> None:  # fmt: skip
        """shared: bytes of dynamic shared memory of the kernels that take any. serial: each
        starts when its predecessor has ended, not before."""
        driver = _driver()
        self.cubin = cubin
        self.device = device
        self._context = _call(driver.cuDevicePrimaryCtxRetain, device)
        early = not serial and _starts_early(device)
        with _Current(self._context):
            self._module = _call(driver.cuModuleLoadData, cubin.image)
            self._kernels = {
                name: _Kernel(
                    int(_call(driver.cuModuleGetFunction, self._module, name.encode())),
                    shared.get(name, 0),
                    early,
                )
                for name in names
            }
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for name, size in shared.items():
                function = _call(driver.cuModuleGetFunction, self._module, name.encode())
                _call(driver.cuFuncSetAttribute, function, attribute, size)

    def entry(self, name: str, grid: Grid, block: int | Grid) -> tuple[int, bytes]:
        """The kernel's handle, and the driver's configuration of a launch."""
        kernel = self._kernels[name]
        return kernel.handle.value or 0, kernel.config(grid, block)

    def launch(
        self,
        name: str,
        grid: Grid,
        block: int | Grid,
        args: Sequence[int],
        stream: int,
    ) -> None:
        """Enqueues `name` on `stream`. `args` are the 8-byte members of its Args, in order.

        The device's context is expected to be current, as it is inside ``torch.cuda.device``.
        """
        if 0 in grid:  # an empty batch; the driver would refuse it
            return
        kernel = self._kernels[name]
        status = kernel.enqueue(grid, block, args, stream)
        if status == INVALID_CONTEXT:
            # A thread that has not yet touched CUDA, as autograd's workers may be.
            _call(_driver().cuCtxSetCurrent, self._context)
            status = kernel.enqueue(grid, block, args, stream)
        if status:
            raise DriverError(f"launching {name} {grid} x {block} failed: {_reason(status)}")


def build_cuda(
    source: str,
    names: Sequence[str],
    *,
    arch: str | None = None,
    fast: bool = False,
    wide: bool = False,
    debug: bool = False,
    device: int | None = None,
) -> CudaModule:
    """Compiles `source` and loads it on `device` (default: torch's current one)."""
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("torch sees no CUDA device; `megafuse doctor` says what is missing.")
    current: int = torch.cuda.current_device()  # also starts CUDA, if nothing has so far
    index = current if device is None else device
    arch = arch or device_arch(index)
    return _load(source, tuple(names), arch, fast, wide, debug, index)


def device_arch(device: int) -> str:
    """The architecture to compile for: "sm_80", or "sm_90a" where 'a' features exist."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _load(
    source: str,
    names: tuple[str, ...],
    arch: str,
    fast: bool,
    wide: bool,
    debug: bool,
    device: int,
) -> CudaModule:
    cubin = compile_cubin(source, names, arch, fast=fast, wide=wide, debug=debug)
    return CudaModule(cubin, names, device)


# ---- launching -----------------------------------------------------------------------------------


class _Calls(threading.local):
    """One thread's prepared launches of a kernel: forward and backward run in different threads."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Prepared, Any]] = {}


class _Kernel:
    """A function handle with everything a launch needs but the arguments."""

    def __init__(self, handle: int, shared: int = 0, early: bool = False) -> None:
        self.handle, self._shared, self._early = ctypes.c_void_p(handle), shared, early
        self._launch = entry_point("cuLaunchKernelEx")
        self._calls = _Calls()

    def config(self, grid: Grid, block: int | Grid) -> bytes:
        return config(grid, block, self._shared, self._early)

    def enqueue(self, grid: Grid, block: int | Grid, args: Sequence[int], stream: int) -> int:
        calls = self._calls.made
        key = grid, block, len(args)
        found = calls.get(key)
        if found is None:
            size = 8 * len(args)
            call = Prepared(self.handle, self.config(grid, block), size)
            found = calls[key] = call, struct.Struct(f"={len(args)}q").pack_into
        call, pack = found
        pack(call.args, 0, *args)
        call.stream.value = stream
        status: int = self._launch(*call.arguments)
        return status


# ---- the driver ----------------------------------------------------------------------------------


class _Current:
    """Makes a context current for a block of code."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        _call(_driver().cuCtxPushCurrent, self._context)

    def __exit__(self, *_: object) -> None:
        _call(_driver().cuCtxPopCurrent)


def make_current(device: int) -> None:
    """Makes the device's primary context this thread's, which may not yet have touched CUDA."""
    driver = _driver()
    _call(driver.cuCtxSetCurrent, _call(driver.cuDevicePrimaryCtxRetain, device))


@functools.cache
def _starts_early(device: int) -> bool:
    """Whether a kernel on `device` may start before its predecessor's end: from Hopper on, and with
    a driver whose graphs know such launches (12.3)."""
    driver = _driver()
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if int(_call(driver.cuDeviceGetAttribute, major, device)) < 9:
        return False
    return int(_call(driver.cuDriverGetVersion)) >= 12030


def _driver() -> Any:
    return _bindings()[0]


def _call(function: Any, *args: Any) -> Any:
    status, *values = function(*args)
    if int(status):
        raise DriverError(f"{function.__name__} failed: {_reason(int(status))}")
    return values[0] if values else None


def _reason(status: int) -> str:
    driver = _driver()
    try:
        return f"{driver.CUresult(status).name} ({status})"
    except ValueError:
        return f"CUDA error {status}"


# ---- NVRTC ---------------------------------------------------------------------------------------

_INSTALL = "install them with `pip install megafuse[cuda12]` or `megafuse[cuda13]`, whichever "
_INSTALL += "matches `torch.version.cuda`"


@functools.cache
def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise ToolchainError(f"CUDA kernels need cuda-bindings and NVRTC: {_INSTALL}.") from error
    return driver, nvrtc


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    nvrtc = _bindings()[1]
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise several types when the library is absent
        raise ToolchainError(f"NVRTC could not be loaded ({error}): {_INSTALL}.") from error
    if int(status):
        raise ToolchainError(f"NVRTC could not be started (error {int(status)}): {_INSTALL}.")
    return int(major), int(minor)


def _nvrtc_compile(text: str, flags: Sequence[str]) -> tuple[bytes, str]:
    nvrtc = _bindings()[1]
    program = _nvrtc_call(nvrtc.nvrtcCreateProgram, text.encode(), b"generated", 0, [], [])
    try:
        options = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        buffer = bytes(_nvrtc_call(nvrtc.nvrtcGetProgramLogSize, program))
        _nvrtc_call(nvrtc.nvrtcGetProgramLog, program, buffer)
        words = buffer.rstrip(b"\0").decode(errors="replace")
        if int(status):
            first = "\n".join(words.splitlines()[:40])
            raise BuildError(f"NVRTC did not compile the generated kernels:\n{first}")
        image = bytes(_nvrtc_call(nvrtc.nvrtcGetCUBINSize, program))
        _nvrtc_call(nvrtc.nvrtcGetCUBIN, program, image)
        return image, words
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc_call(function: Any, *args: Any) -> Any:
    status, *values = function(*args)
    if int(status):
        raise BuildError(f"{function.__name__} failed with NVRTC error {int(status)}")
    return values[0] if values else None


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def _parse_resources(log: str) -> dict[str, KernelResources]:
    """Reads the assembler's report: per kernel an entry line, a spill line and a usage line."""
    found: dict[str, KernelResources] = {}
    name, spills = "", (0, 0)
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spill := _SPILL.search(line):
            spills = int(spill[1]), int(spill[2])
        elif (used := _USED.search(line)) and name:
            shared = _SHARED.search(line)
            found[name] = KernelResources(int(used[1]), *spills, int(shared[1]) if shared else 0)
            name, spills = "", (0, 0)
    return found


def _pack(cubin: Cubin) -> bytes:
    """One cache entry: a line of JSON, then the image."""
    resources = {name: asdict(r) for name, r in cubin.resources.items()}
    return json.dumps({"log": cubin.log, "resources": resources}).encode() + b"\n" + cubin.image


def _unpack(data: bytes) -> Cubin:
    head, _, image = data.partition(b"\n")
    facts = json.loads(head)
    resources = {name: KernelResources(**r) for name, r in facts["resources"].items()}
    return Cubin(image, facts["log"], resources)
