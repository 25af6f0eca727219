"""What every test of the compiler shares: one kernel cache for the whole run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that all workers of this run share, so that a kernel is compiled once.

    MEGAFUSE_TEST_CACHE names one that outlives the run.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    path = Path(os.environ.get("MEGAFUSE_TEST_CACHE") or shared / "kernels-of-this-run")
    before = {k: os.environ.get(k) for k in ("MEGAFUSE_CACHE", "MEGAFUSE_FUEL", "MEGAFUSE_DUMP")}
    os.environ["MEGAFUSE_CACHE"] = str(path)
    os.environ.pop("MEGAFUSE_FUEL", None)
    os.environ.pop("MEGAFUSE_DUMP", None)
    yield path
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors: more threads only compete with the compilers that run beside."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A test that hangs fails, with its traceback, rather than hold up the run.

    MEGAFUSE_TEST_SECONDS sets the limit; sanitized builds on a busy machine take the longest.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the test ran past its time limit")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(os.environ.get("MEGAFUSE_TEST_SECONDS", "300")))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
