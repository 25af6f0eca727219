"""What a fused module is measured beside: eager, torch.compile, a CUDA graph, bare products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafuse.errors import MegafuseError
from megafuse.fusion.summary import MatmulShape
from megafuse.tools.candidate import Ready
from megafuse.tools.timing import Step

CANDIDATE = "megafuse"
FLOOR = "bare products"
ABOUT = {
    "eager": "the unchanged module",
    "compile": "torch.compile, default mode",
    "autotuned": "torch.compile, mode max-autotune-no-cudagraphs (minutes to compile)",
    "overhead": "torch.compile, mode reduce-overhead (CUDA graphs)",
    "graphed": "the unchanged module's step captured in one CUDA graph",
    "products": "the graph's matrix products alone (torch.bmm), back to back: the floor",
}
LABELS = {
    "eager": "eager",
    "compile": "torch.compile",
    "autotuned": "compile max-autotune",
    "overhead": "compile reduce-overhead",
    "graphed": "graphed eager",
    "products": FLOOR,
}
ORDER = ("eager", CANDIDATE, *(name for name in ABOUT if name != "eager"))
"""In which they are built: what keeps memory of its own comes last."""
PEAKED = {"eager", CANDIDATE, "compile", "autotuned"}
"""Those whose memory the allocator's counters show whole: no CUDA graph's own pool."""


class RivalError(MegafuseError):
    """A rival was asked for that does not exist or cannot run here."""


_MODES = {"compile": None, "autotuned": "max-autotune-no-cudagraphs", "overhead": "reduce-overhead"}


def default_rivals(device: torch.device) -> tuple[str, ...]:
    """On a GPU all that are ready in seconds; on a CPU those that need no compiler run."""
    if device.type == "cuda":
        return ("eager", "compile", "graphed", "products")
    return ("eager", "products")


def parse_rivals(text: str | None, device: torch.device) -> tuple[str, ...]:
    """Read a comma-separated list; eager is always included, the ratios are taken against it."""
    if text is None:
        return default_rivals(device)
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in ABOUT]
    if unknown:
        raise RivalError(f"unknown rival {unknown[0]!r}: choose from {', '.join(ABOUT)}")
    if "graphed" in chosen and device.type != "cuda":
        raise RivalError("the rival 'graphed' is a CUDA graph: it needs --device cuda")
    return tuple(name for name in ABOUT if name in chosen or name == "eager")


def build_rival(name: str, ready: Ready, products: Sequence[MatmulShape]) -> Step:
    """Return the step of one rival, ready to be timed.

    Raises RivalError with PyTorch's own first line when it cannot be built.
    """
    module = ready.case.module
    try:
        if name == "eager":
            return ready.step(module)
        if name in _MODES:
            step = ready.step(torch.compile(module, mode=_MODES[name]))
            for _ in range(3):  # a CUDA graph warms up, records, then replays
                step()
            return step
        if name == "graphed":
            return graphed(ready)
        return bare_products(products, ready.grad_outputs[0].device)
    except RivalError:
        raise
    except Exception as error:  # compilers and capture fail in many ways; the run goes on
        ready.clear()
        lines = str(error).strip().splitlines() or [""]
        raise RivalError(f"{LABELS[name]}: {type(error).__name__}: {lines[0]}") from error


def graphed(ready: Ready) -> Step:
    """Capture the eager step, warmed up on a side stream, in a CUDA graph; return its replay."""
    step = ready.step(ready.case.module)
    side: Any = torch.cuda.Stream(ready.grad_outputs[0].device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    ready.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ready.clear()
    return graph.replay


def bare_products(products: Sequence[MatmulShape], device: torch.device) -> Step:
    """All matrix products of the graph on random operands, outputs preallocated.

    A transposed operand is stored transposed and read by stride, as in the graph.
    Raises RivalError when there are none.
    """
    if not products:
        raise RivalError(f"{FLOOR}: this graph has no matrix products")
    generator = torch.Generator(device=device).manual_seed(1)

    def operand(p: MatmulShape, rows: int, columns: int, transposed: bool) -> Tensor:
        shape = (p.batch, columns, rows) if transposed else (p.batch, rows, columns)
        values = torch.randn(shape, dtype=p.dtype, device=device, generator=generator)
        return values.transpose(1, 2) if transposed else values

    work = []
    for p in products:
        a = operand(p, p.m, p.k, p.a_transposed)
        b = operand(p, p.k, p.n, p.b_transposed)
        work.append((a, b, torch.empty(p.batch, p.m, p.n, dtype=p.dtype, device=device)))

    def step() -> None:
        for a, b, out in work:
            torch.bmm(a, b, out=out)

    return step
