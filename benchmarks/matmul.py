"""The six products of the headline block against torch.bmm, and two with their epilogues.

    python benchmarks/matmul.py [--shape 1024,64,1280,2] [--samples 15] [--tiles] [--json FILE]

Each product is checked first, against float32 and torch.bmm's own error; a wrong one is not timed.
Candidates take turns, L2 is flushed before every sample, medians are printed. With an epilogue
torch.bmm alone is one of them. The GPU is power-capped: compare what took turns only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megafuse.codegen.matmul import Step
from megafuse.codegen.tiles import TILES, Cut, TileConfig, cycles
from megafuse.runtime.matmul import Matmul, Product, View, accepts

BIAS = (Step("add", "row"),)
BOTH = (*BIAS, Step("add", "tensor"))
BARE = "torch.bmm alone"


@dataclass
class Job:
    """One product, and the same with torch."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    epilogue: tuple[Step, ...] = ()
    rows: list[torch.Tensor] = field(default_factory=list)
    tensor: torch.Tensor | None = None

    def __post_init__(self) -> None:
        batch, m, _ = self.a.shape
        self.c = torch.empty(batch, m, self.b.shape[2], dtype=self.a.dtype, device=self.a.device)
        self.product = Product(
            View.of(self.a), View.of(self.b), View.of(self.c), self.epilogue,
            tuple(View.of(r) for r in self.rows),
            View.of(self.tensor) if self.tensor is not None else None,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        return 2 * self.a.shape[0] * self.a.shape[1] * self.a.shape[2] * self.b.shape[2]

    def ours(self, tile: TileConfig | None, splits: int = 1) -> Callable[[], None]:
        matmul = Matmul(self.product, 0, tile=tile, splits=splits)
        sums = torch.empty(matmul.sums, device="cuda")  # stays alive with the function below
        pointers = self.a.data_ptr(), self.b.data_ptr(), self.c.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        rows = [r.data_ptr() for r in self.rows]
        tensor = self.tensor.data_ptr() if self.tensor is not None else 0
        return lambda: matmul.launch(*pointers, stream, rows, tensor, sums.data_ptr())

    def bare(self) -> None:
        torch.bmm(self.a, self.b, out=self.c)

    def torch(self) -> None:
        self.bare()
        for row in self.rows:
            self.c.add_(row[:, None, :])
        if self.tensor is not None:
            self.c.add_(self.tensor)

    def error(self) -> float:
        """Relative Frobenius error of c over a few batches, against float32."""
        worst = 0.0
        for t in sorted({0, self.a.shape[0] // 3, self.a.shape[0] - 1}):
            want = self.a[t].float() @ self.b[t].float()
            for row in self.rows:
                want += row[t].float()
            if self.tensor is not None:
                want += self.tensor[t].float()
            worst = max(worst, float((self.c[t].float() - want).norm() / want.norm()))
        return worst


def jobs(batch: int, tokens: int, width: int, factor: int, dtype: torch.dtype) -> list[Job]:
    hidden = factor * width

    def data(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    x = data(batch, tokens, width).transpose(0, 1)
    dy = data(batch, tokens, width).transpose(0, 1)
    h, dz = data(tokens, batch, hidden), data(tokens, batch, 2 * hidden)
    w1 = data(tokens, width, 2 * hidden, scale=width**-0.5)
    wout = data(tokens, hidden, width, scale=hidden**-0.5)
    b1, bout = data(tokens, 2 * hidden), data(tokens, width)
    return [
        Job("z     = x @ w1", x, w1),
        Job("y     = h @ wout", h, wout),
        Job("dh    = dy @ wout^T", dy, wout.transpose(1, 2)),
        Job("dwout = h^T @ dy", h.transpose(1, 2), dy),
        Job("dw1   = x^T @ dz", x.transpose(1, 2), dz),
        Job("dx    = dz @ w1^T", dz, w1.transpose(1, 2)),
        Job("z + bias", x, w1, BIAS, [b1]),
        Job("y + bias + residual", h, wout, BOTH, [bout], x),
    ]


def interleaved(candidates: dict[str, Callable[[], None]], samples: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns, with the L2 overwritten before every one."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in candidates}
    for name in candidates:
        candidates[name]()
    for _ in range(samples):
        for name, run in candidates.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {n: [s.elapsed_time(e) for s, e in pairs] for n, pairs in marks.items()}


def measure(job: Job, samples: int, all_tiles: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"name": job.name, "flops": job.flops}
    if reason := accepts(job.product):
        return {**result, "refused": reason}
    job.torch()
    allowed = 1.05 * job.error() + 1e-4
    candidates: dict[str, Callable[[], None]] = {"torch": job.torch}
    if job.epilogue:
        candidates[BARE] = job.bare
    for tile in TILES if all_tiles else (None,):
        run = job.ours(tile)
        job.c.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        error = job.error()
        key = "ours" if tile is None else str(tile)
        result.setdefault("error", {})[key] = error
        if not error <= allowed:
            return {**result, "wrong": f"error {error:.3g}, torch.bmm's own is {allowed:.3g}"}
        candidates[key] = run
    product, sms = job.product, torch.cuda.get_device_properties(0).multi_processor_count
    result["tile"] = str(Matmul(product, 0).cut)
    result["predicted_cycles"] = {
        str(t): cycles(Cut(t), product.batch, product.m, product.n, product.k, sms) for t in TILES
    }
    result["ms"] = interleaved(candidates, samples)
    return result


def host_microseconds(job: Job) -> dict[str, float]:
    """Host time of a launch: with the pointers of the last one, and with others every time."""
    matmul = Matmul(job.product, 0)
    sums = torch.empty(matmul.sums, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    a, b = job.a.data_ptr(), job.b.data_ptr()
    outputs = [job.c.data_ptr(), torch.empty_like(job.c).data_ptr()]
    found = {}
    for name, chosen in (("same pointers", outputs[:1] * 2), ("new pointers", outputs)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(200):
            matmul.launch(a, b, chosen[i % 2], stream, (), 0, sums.data_ptr())
        found[name] = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1024,64,1280,2", help="B,T,D,k (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--tiles", action="store_true", help="time every tile")
    parser.add_argument("--json", help="write everything measured to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("this benchmark needs a Hopper GPU", file=sys.stderr)
        return 2
    shape = [int(s) for s in options.shape.split(",")]
    work = jobs(*shape, getattr(torch, options.dtype))  # type: ignore[call-arg]
    results, failed, totals = [], False, [0.0, 0.0]
    print(f"{torch.cuda.get_device_name()}, {options.dtype}, B,T,D,k = {options.shape}")
    print(f"{'product':22}{'tile':>9}{'ours ms':>9}{'torch ms':>9}{'ratio':>7}"
          f"{'TFLOP/s':>9}{'error':>9}")  # fmt: skip
    for i, job in enumerate(work):
        result = measure(job, options.samples, options.tiles)
        results.append(result)
        if "ms" not in result:
            failed = True
            print(f"{job.name:22}{result.get('wrong') or result.get('refused')}", flush=True)
            continue
        medians = {k: statistics.median(v) for k, v in result["ms"].items()}
        for key, ms in medians.items():
            if key in ("torch", BARE):
                continue
            tile = result["tile"] if key == "ours" else key
            mark = "*" if options.tiles and tile == result["tile"] else ""
            beside = f"  {ms / medians[BARE]:.3f} of {BARE}" if BARE in medians else ""
            print(f"{job.name:22}{mark + tile:>9}{ms:9.3f}{medians['torch']:9.3f}"
                  f"{ms / medians['torch']:7.3f}{job.flops / ms / 1e9:9.0f}"
                  f"{result['error'][key]:9.2e}{beside}", flush=True)  # fmt: skip
        if i < 6:
            totals[0] += medians.get("ours", medians.get(result["tile"], 0.0))
            totals[1] += medians["torch"]
    host: dict[str, float] = {}
    if not failed:
        print(f"{'all six':22}{'':9}{totals[0]:9.3f}{totals[1]:9.3f}{totals[0] / totals[1]:7.3f}")
    small = jobs(4, 4, 64, 2, getattr(torch, options.dtype))[0]
    if accepts(small.product) is None:
        host = host_microseconds(small)
        print("host time of a launch: " + ", ".join(f"{v:.1f} us ({k})" for k, v in host.items()))
    if options.json:
        record = {"shape": shape, "dtype": options.dtype, "device": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "results": results, "host_us": host}  # fmt: skip
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
