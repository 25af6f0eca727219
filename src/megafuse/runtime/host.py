"""Generated source on a CPU: compiled by the system's C++ compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megafuse.errors import BuildError, ToolchainError
from megafuse.runtime import cache
from megafuse.runtime.launch import Grid, config
from megafuse.runtime.source import assemble

_FLAGS = (
    "-x", "c++", "-std=c++17", "-fPIC", "-shared",
    # Without these two the compiler may not vectorise comparisons and square roots. Neither
    # changes a result: nothing here reads errno or the floating-point exception flags.
    "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-unused",
)  # fmt: skip
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
             "-fno-omit-frame-pointer")  # fmt: skip


class HostModule:
    """Compiled entry points, each called with the 8-byte members of its Args in order."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self._entries: dict[str, Callable[..., None]] = {}
        for name in names:
            entry = getattr(library, name)
            entry.restype = None
            self._entries[name] = entry

    def entry(self, name: str, grid: Grid, block: int | Grid) -> tuple[int, bytes]:
        """The address of an entry point, and a launch's configuration, which it does not need."""
        address = ctypes.cast(self._entries[name], ctypes.c_void_p).value  # type: ignore[arg-type]
        return address or 0, config(grid, block, 0)

    def launch(self, name: str, args: Sequence[int]) -> None:
        """Runs every part of `name` and returns when it is done."""
        self._entries[name]((ctypes.c_longlong * len(args))(*args))


def build_host(
    source: str,
    names: Sequence[str],
    *,
    fast: bool = False,
    sanitize: bool = False,
    debug: bool = False,
) -> HostModule:
    """Compiles `source` (or finds it in the cache) and loads it.

    fast: every stored tensor is 16 bits wide, so float32 arithmetic is enough (``MF_FAST``).
    sanitize: address and undefined-behaviour sanitizers; the process must have been started with
        `sanitizer_env`. debug: no optimisation, with symbols and ``MF_DEBUG``.
    """
    compiler = find_compiler()
    text = assemble(source, "host.h")
    flags = [*_FLAGS, *_tuning(debug, sanitize), *(_SANITIZE if sanitize else ())]
    flags += ["-DMF_FAST=1"] if fast else []
    key = cache.digest("host", text, "\0".join(flags), " ".join(compiler), _identity(compiler))

    def build() -> bytes:
        return _compile(compiler, flags, text)

    path = cache.get_or_build(key, ".so", build)
    try:
        return HostModule(path, names)
    except (OSError, AttributeError):
        pass  # an entry that does not load: built once more below, and then the error is real
    try:
        return HostModule(cache.rebuild(key, ".so", build), names)
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels do not load: {error}") from error


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's command: ``CXX`` if set, else g++, clang++ or c++."""
    chosen = os.environ.get("CXX")
    candidates = [tuple(shlex.split(chosen))] if chosen else [("g++",), ("clang++",), ("c++",)]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise ToolchainError(
        (f"CXX={chosen!r} is not an executable. " if chosen else "No C++ compiler was found. ")
        + "Generated CPU kernels need g++ or clang++: install your system's package g++ "
        "(Debian, Ubuntu), gcc-c++ (Fedora, RHEL) or clang, or choose "
        "Options(executor='reference')."
    )


def sanitizer_env() -> dict[str, str]:
    """What a child Python needs in its environment to load kernels built with sanitize=True."""
    compiler = find_compiler()
    libraries = []
    for library in ("libasan.so", "libubsan.so", "libstdc++.so"):
        found = _run([*compiler, f"-print-file-name={library}"]).stdout.strip()
        if not os.path.isabs(found):
            raise ToolchainError(
                f"{compiler[0]} has no {library}: install the sanitizer runtimes that belong to it "
                "(libasan and libubsan on Fedora; part of g++ on Debian and Ubuntu)."
            )
        libraries.append(os.path.realpath(found))
    # Python itself does not free everything at exit, so leaks are not looked for.
    return {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}


def _tuning(debug: bool, sanitize: bool) -> tuple[str, ...]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    if debug or sanitize:
        return ("-O0" if debug else "-O1", "-g", "-DMF_DEBUG=1", native)
    return ("-O3", native)


def _compile(compiler: Sequence[str], flags: Sequence[str], text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="megafuse-") as scratch:
        output = os.path.join(scratch, "kernels.so")
        done = _run([*compiler, *flags, "-o", output, "-"], text)
        if done.returncode != 0 or not os.path.exists(output):
            words = "\n".join(done.stderr.splitlines()[:40])
            raise BuildError(f"{compiler[0]} did not compile the generated kernels:\n{words}")
        return Path(output).read_bytes()


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # UTF-8 whatever the locale: NVRTC sets the process's to C, and compilers quote in UTF-8.
    return subprocess.run(
        command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False
    )


@functools.cache
def _identity(compiler: tuple[str, ...]) -> str:
    """Compiler version and processor: -march=native code must not reach another machine."""
    version = _run([*compiler, "--version"]).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        processor = platform.processor()
    return f"{version}\n{platform.machine()}\n{processor}"
