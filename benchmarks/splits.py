"""Products with few tiles and a long k: split as the cost model has it, otherwise, and torch.

    python benchmarks/splits.py [--samples 15] [--size M,N,K ...] [--json FILE]

Weight gradients, both operands with k outermost. Each candidate is checked first; a wrong one is
not timed. Beside every median stands the prediction in thousands of cycles: where ratios differ,
the constants of codegen/tiles.py are wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from matmul import Job, interleaved

from megafuse.codegen.tiles import TILES, Cut, cycles, ranked, split_counts

SIZES = ("1408,2048,16384", "768,3072,8192", "512,512,65536", "256,256,100000", "64,128,100000")


def cuts(m: int, n: int, k: int, sms: int) -> list[Cut]:
    """The best of every tile, the best in one pass, and the best tile with half and twice the
    splits."""
    size = 1, m, n, k
    best, *others = ranked(*size, sms)
    whole = min((Cut(t) for t in TILES), key=lambda cut: cycles(cut, *size, sms))
    counts = split_counts(best.tile, *size, sms)
    near = [min(counts, key=lambda s: abs(s - best.splits * f)) for f in (0.5, 0.75, 1.5, 2.0)]
    return list(dict.fromkeys([best, whole, *(Cut(best.tile, s) for s in near), *others]))


def measure(m: int, n: int, k: int, samples: int) -> dict[str, Any]:
    a = torch.randn(1, k, m, device="cuda").bfloat16().transpose(1, 2)
    b = torch.randn(1, k, n, device="cuda").bfloat16()
    job = Job(f"{m}x{n}x{k}", a, b)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    job.torch()
    allowed = 1.05 * job.error() + 1e-4
    candidates: dict[str, Callable[[], None]] = {"torch": job.torch}
    predicted: dict[str, float] = {}
    for cut in cuts(m, n, k, sms):
        run = job.ours(cut.tile, cut.splits)
        job.c.fill_(float("nan"))
        run()
        if not job.error() <= allowed:
            return {"name": job.name, "wrong": str(cut), "error": job.error(), "allowed": allowed}
        candidates[str(cut)], predicted[str(cut)] = run, cycles(cut, 1, m, n, k, sms)
    return {"name": job.name, "predicted": predicted, "ms": interleaved(candidates, samples)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="*", default=SIZES, help="M,N,K (default %(default)s)")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", help="write everything measured to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("this benchmark needs a Hopper GPU", file=sys.stderr)
        return 2
    results = []
    for text in options.size:
        m, n, k = (int(s) for s in text.split(","))
        result = measure(m, n, k, options.samples)
        results.append(result)
        print(result["name"] + (f"  WRONG: {result}" if "wrong" in result else ""))
        for i, (name, ms) in enumerate(result.get("ms", {}).items()):
            cycles_k = result["predicted"].get(name, 0.0) / 1e3
            mark = "*" if i == 1 else " "  # the cost model's choice comes first after torch
            print(f"  {mark}{name:14}{statistics.median(ms):9.4f} ms{cycles_k:9.1f} k", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "results": results}, file, indent=1)
    return int(any("wrong" in r for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
