"""MEGAFUSE_DUMP: every stage of the pipeline, the generated source and a reproduction, as files.

    00-capture.py ...   the graph after each pass
    plan-forward.txt    regions, reads, writes, and what was refused with the reason
    F1.host.cpp ...     generated source, as compiled
    repro.py            runs the captured graph fused against itself unfused: `python repro.py`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafuse import ops
from megafuse.config import Options
from megafuse.errors import OutputError
from megafuse.fusion.plan import GraphPlan, RowRegion
from megafuse.index import show
from megafuse.ir import Graph, evaluate, print_graph

Observe = Callable[[str, str], None]


def observer(options: Options) -> Observe:
    """Writes (name, text) under `options.dump`, a folder for each plan, or does nothing."""
    if options.dump is None:
        return lambda name, text: None
    root = options.dump
    taken = len(list(root.glob("plan*"))) if root.exists() else 0
    folder = root / f"plan{taken}"

    return lambda name, text: _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"MEGAFUSE_DUMP: {path} cannot be written ({error.strerror or error}); name a folder "
            "you may write to, or unset it"
        ) from error


def plan_text(plan: GraphPlan) -> str:
    """Regions with their stages, and every refused merge."""
    lines: list[str] = []
    for region in plan.regions:
        reads = ", ".join(f"{n.name}: {n.type}" for n in region.reads(plan.buffers))
        writes = ", ".join(f"{n.name}: {n.type}" for n in region.writes())
        lines += [f"{region.name} {region.kind}", f"  reads  {reads}", f"  writes {writes}"]
        for k, stage in enumerate(region.stages if isinstance(region, RowRegion) else ()):
            rows = " ".join(f"{a}<{a.extent}" for a in stage.rows())
            cols = " ".join(f"{a}<{a.extent}" for a in stage.settled_cols())
            lines.append(f"  stage {k}: rows {rows}; columns {cols}")
            for root in stage.roots:
                where = f"{root.node.name} at {show(root.at)}"
                lines.append(f"    {root.kind} {where}  {root.node.origin}")
    lines += ["", "kept apart:"]
    lines += [f"  {w.producer} | {w.consumer}: {w.reason}" for w in plan.refused]
    return "\n".join(lines) + "\n"


REPRO = '''"""Runs one captured graph fused and unfused; exit status 1 when the two differ.

Inputs are random with the captured shapes and dtypes. Run on the device named by MEGAFUSE_DEVICE
(default: cuda when there is one, else cpu).
"""

import os
import sys

import torch
from torch import inf, nan  # printed graphs use them

import megafuse

DEVICE = os.environ.get("MEGAFUSE_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {shapes}
GRADS = {grads}
OPTIONS = megafuse.Options(rounding={rounding!r}, memory={memory!r}, dump=None)


{source}

def main() -> int:
    torch.manual_seed(0)
    inputs = []
    for shape, dtype, wants in zip([s for s, _ in SHAPES], [d for _, d in SHAPES], GRADS):
        if dtype.is_floating_point:
            tensor = torch.randn(shape, dtype=torch.float32).to(dtype)
        else:
            tensor = torch.zeros(shape, dtype=dtype)
        inputs.append(tensor.to(DEVICE).requires_grad_(wants))
    fused = megafuse.fuse(graph, *inputs, options=OPTIONS)
    worst = 0.0
    results = []
    for f in (graph, fused):
        outputs = [o for o in f(*inputs) if o is not None]
        roots = [o for o in outputs if o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        torch.manual_seed(1)
        grads = torch.autograd.grad(roots, wanted, [torch.randn_like(o) for o in roots],
                                    allow_unused=True) if roots and wanted else ()
        results.append([*outputs, *grads])
    for i, (a, b) in enumerate(zip(*results)):
        if a is None or b is None or not a.is_floating_point():
            continue
        error = ((a - b).double().norm() / a.double().norm().clamp_min(1e-30)).item()
        worst = max(worst, error / torch.finfo(a.dtype).eps if error == error else float("inf"))
        print(f"tensor {{i}}: {{tuple(a.shape)}} {{a.dtype}} relative difference {{error:.2e}}")
    print(f"largest difference: {{worst:.2f}} units in the last place, Frobenius")
    return int(not worst < 64)


if __name__ == "__main__":
    sys.exit(main())
'''


def repro(graph: Graph, outputs: int, primals: int, grads: list[bool], hints: dict[str, int],
          options: Options) -> str:  # fmt: skip
    """Source of a script that rebuilds the forward graph, fuses it and compares."""
    from megafuse.passes.dce import dce

    forward = dce(Graph(graph.inputs[:primals], graph.nodes, graph.outputs[:outputs]))
    kept = set(forward.live()) | set(forward.inputs)
    forward.nodes = [n for n in forward.nodes if n in kept]
    shapes = [(tuple(evaluate(d, hints) for d in n.shape), n.dtype) for n in forward.inputs]
    text = "[" + ", ".join(f"({s}, {d})" for s, d in shapes) + "]"
    return REPRO.format(shapes=text, grads=list(grads), rounding=options.rounding,
                        memory=options.memory, source=print_graph(forward, ops.spell))  # fmt: skip


def write_sources(options: Options, plan: GraphPlan, suffix: str, kernels: list[Any]) -> None:
    """Generated source of each region, beside the newest plan."""
    if options.dump is None:
        return
    folders = sorted(options.dump.glob("plan*"), key=lambda p: p.stat().st_mtime)
    folder: Path = folders[-1] if folders else options.dump
    for kernel in kernels:
        _write(folder / f"{kernel.name.removeprefix('mf_')}.{suffix}", kernel.source)
