"""Measure what the cost model rests on: copy out of memory and cache, a launch, a product.

Nothing here decides how a plan is made: rates turn bytes and operations into predicted times.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.table import Table

from megafuse import rates
from megafuse.config import Options
from megafuse.device import DeviceSpec, device_name, spec_of
from megafuse.errors import OutputError
from megafuse.rates import Rates
from megafuse.tools.tables import gigabytes, table, tera

Progress = Callable[[str, int, int], None]
Work = Callable[[], object]
_REPEATS = 9
_TRAIN = 64  # copies in one CUDA graph
_DEFAULT_CACHE = 1 << 20


def calibrate(device: torch.device, progress: Progress = lambda *_: None) -> tuple[Rates, Path]:
    """Measure `device` and keep the result in the cache directory, from where every later process
    takes it; about half a minute. Raises OutputError when it cannot be kept, ToolchainError where
    generated kernels cannot be built."""
    measured = measure(device, progress)
    try:
        return measured, rates.store(measured)
    except OSError as error:
        raise OutputError(
            f"the measured rates cannot be kept in {rates.path_for(measured.device)} "
            f"({error.strerror or error}); set MEGAFUSE_CACHE to a folder you may write to"
        ) from error


def measure(device: torch.device, progress: Progress = lambda *_: None) -> Rates:
    """The rates of `device`, each the median of several runs."""
    large = 2 << 30 if _is_cuda(device) else 256 << 20
    cache_bytes = _cache_bytes(device) // 2  # the other half is left to what else is in use
    steps: dict[str, Callable[[], float]] = {
        "copy out of memory": lambda: _copy_rate(device, large),
        "copy out of cache": lambda: _copy_rate(device, cache_bytes),
        "a launch": lambda: _launch_seconds(device),
    }
    for dtype in _dtypes(device):
        steps[_short(dtype)] = lambda dtype=dtype: _product_rate(device, dtype)  # type: ignore[misc]
    found: dict[str, float] = {}
    for done, (name, run) in enumerate(steps.items()):
        progress(f"measuring {name}", done, len(steps))
        found[name] = run()
    progress("measured", len(steps), len(steps))
    return Rates(
        device_name(device), datetime.date.today().isoformat(), found["copy out of memory"],
        found["copy out of cache"], cache_bytes, found["a launch"],
        {_short(d): found[_short(d)] for d in _dtypes(device)},
    )  # fmt: skip


def comparison(measured: Rates, device: torch.device) -> Table:
    """The measured rates beside the defaults they replace."""
    default: DeviceSpec = spec_of(device)
    made = table(measured.device, "", "measured", "default")
    made.add_row("copy out of memory", f"{gigabytes(measured.bandwidth)}/s",
                 f"{gigabytes(default.bandwidth)}/s")  # fmt: skip
    made.add_row(f"copy within {gigabytes(measured.cache_bytes)} of cache",
                 f"{gigabytes(measured.l2_bandwidth)}/s", "as memory")  # fmt: skip
    made.add_row("one launch", f"{measured.launch_seconds * 1e6:.2f} us",
                 f"{default.launch_seconds * 1e6:.2f} us")  # fmt: skip
    for name, value in measured.matmul_rate.items():
        expected = default.matmul_rate.get(getattr(torch, name))
        made.add_row(f"matrix product, {name}", tera(value), tera(expected) if expected else "-")
    return made


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    halves = (torch.bfloat16, torch.float16) if _is_cuda(device) else (torch.bfloat16,)
    return (torch.float32, *halves)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cache_bytes(device: torch.device) -> int:
    if _is_cuda(device):
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 32 << 20
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return _DEFAULT_CACHE


@contextmanager
def _one_thread() -> Iterator[None]:
    """Generated host code runs in the calling thread, so the copy it is compared with does too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copy_rate(device: torch.device, moved: int) -> float:
    """Bytes a second read plus written by copying `moved`/2 bytes again and again."""
    source = torch.ones(max(moved // 2 // 4, 1), device=device)
    target = torch.empty_like(source)
    nbytes = 2 * source.numel() * source.element_size()
    if not _is_cuda(device):
        times = max(1, (16 << 20) // nbytes)  # a few milliseconds, whatever the size

        def repeat() -> None:
            for _ in range(times):
                target.copy_(source)

        with _one_thread():
            return nbytes * times / _seconds(repeat, device)
    tiny, other = torch.ones(1, device=device), torch.ones(1, device=device)
    # A small copy is over before the next is enqueued: a graph enqueues many at once, and what the
    # launches alone cost is taken off.
    empty = _seconds(_graph(lambda: tiny.copy_(other)), device)
    full = _seconds(_graph(lambda: target.copy_(source)), device)
    return nbytes * _TRAIN / max(full - empty, full / 2)


def _graph(work: Work) -> Work:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_TRAIN):
            work()
    return graph.replay  # type: ignore[no-any-return]


def _launch_seconds(device: torch.device) -> float:
    """One region of a plan on a tensor of one row: the host's share, or the device's if longer."""
    from megafuse.api import fuse

    x = torch.ones(1, 32, device=device)
    compiled = fuse(lambda x: x + 1.0, options=Options(dump=None, fuel=None)).build(x)
    assert compiled is not None
    sizes = tuple(compiled.plan.sizes_of([x])[k] for k in sorted(compiled.plan.sizes_of([x])))
    count = 200

    def runs() -> None:
        for _ in range(count):
            compiled.run_forward([x], sizes)

    return _seconds(runs, device) / count


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    half = dtype != torch.float32
    n = (8192 if half else 4096) if _is_cuda(device) else 768
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return 2 * n**3 / _seconds(lambda: a @ b, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _seconds(work: Work, device: torch.device) -> float:
    """Median time of `work`, which has run before."""
    work()
    taken = []
    for _ in range(_REPEATS):
        if _is_cuda(device):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if _is_cuda(device):
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
