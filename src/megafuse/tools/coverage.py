"""What fusion does to every subgraph of the zoo: regions, operators, bytes and, on a GPU, speed.

Plans are made on meta tensors at the GPU size, in bfloat16, as for a Hopper GPU; no GPU is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from megafuse.compiler import Plan, make_plan
from megafuse.config import Options
from megafuse.device import H200
from megafuse.fusion.describe import computed, summarize
from megafuse.fusion.plan import ExternRegion, GraphPlan, MatmulRegion, Region, RowRegion
from megafuse.fusion.summary import PlanSummary
from megafuse.ir import evaluate
from megafuse.subgraphs import Case, Settings
from megafuse.tools.bench import measure, write_json
from megafuse.tools.candidate import Candidate
from megafuse.tools.environment import environment
from megafuse.tools.rivals import CANDIDATE, LABELS
from megafuse.zoo import ENTRIES, subgraph

Progress = Callable[[str, int, int], None]
DTYPE = torch.bfloat16
LEAST_SHARE = 0.9

PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}
LIBRARY = {
    "aten.convolution", "aten.convolution_backward", "aten.embedding",
    "aten.embedding_dense_backward", "aten.gather", "aten.scatter", "aten.index_select",
    "aten.index_put", "aten.sort", "aten.topk", "aten.cumsum", "megafuse.attention",
    "megafuse.attention_backward", "megafuse.masked_attention",
    "megafuse.masked_attention_backward",
}  # fmt: skip
"""Operators that are kernels of their own kind: fused around, never into."""


@dataclass(frozen=True)
class Row:
    """One entry. operators, regions: how many run, views apart; before, after: bytes moved by one
    step; elementwise: bytes that eager moves outside products and library operators; unfused: those
    of them that regions of one operator, and PyTorch calls, still move; speeds: milliseconds by
    candidate, or why there are none."""

    name: str
    about: str
    operators: int
    regions: Mapping[str, int]
    before: int
    after: int
    elementwise: int
    unfused: int
    speeds: Mapping[str, float] | str

    @property
    def share(self) -> float:
        return share([self])


def share(rows: Sequence[Row]) -> float:
    """How much of the bytes outside products and library operators lies in fused regions."""
    total = sum(r.elementwise for r in rows)
    return 1.0 - sum(min(r.unfused, r.elementwise) for r in rows) / max(total, 1)


def meta_plan(case: Case) -> Plan:
    """The plan of one call whose tensors are on the meta device. Raises CaptureError."""
    module = case.module
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    own = [t for _, t in (*module.named_parameters(), *module.named_buffers())]
    given = [a for a in case.args if isinstance(a, Tensor)]

    def function(values: Sequence[Tensor]) -> Any:
        mine = dict(zip(names, values, strict=False))
        with _reparametrize_module(module, mine, tie_weights=True):
            return module(*values[len(own) :])

    tensors = [*own, *given]
    parameters = [i < len(own) for i in range(len(tensors))]
    needs = [t.requires_grad for t in tensors]
    return make_plan(function, tensors, parameters, needs, module, Options(), epilogues=True,
                     on_gpu=True)  # fmt: skip


def cover(name: str, speeds: Mapping[str, float] | str) -> Row:
    """The figures of one entry at its GPU size."""
    meta = Settings(None, DTYPE, torch.device("meta"))
    case = subgraph(name, meta, "gpu").case(0)
    plan = meta_plan(case)
    summary = summarize(plan, plan.hints, H200)
    eager = [(o.origin.op, o.read + o.written) for o in plan.captured.eager()]
    kinds: dict[str, int] = {}
    for region in summary.regions:
        kind = {"group": "rows"}.get(region.kind, region.kind)
        kinds[kind] = kinds.get(kind, 0) + 1
    elementwise = sum(
        evaluate(nbytes, plan.hints) for target, nbytes in eager
        if target not in PRODUCTS | LIBRARY
    )  # fmt: skip
    about = (ENTRIES[name].__doc__ or "").splitlines()[0].rstrip(".")
    return Row(
        name, about, len(eager), kinds, summary.unfused_bytes, summary.fused_bytes, elementwise,
        _unfused(plan, summary), speeds,
    )  # fmt: skip


def _packet(target: str) -> str:
    """The operator without its overload."""
    return target.rpartition(".")[0]


def _unfused(plan: Plan, summary: PlanSummary) -> int:
    """Bytes of regions that hold a single operator and of PyTorch calls that ought to be fused."""
    moved = {r.name: r.bytes_read + r.bytes_written for r in summary.regions}
    graphs = [g for g in (plan.forward, plan.backward) if g is not None]
    return sum(moved[r.name] for g in graphs for r in g.regions if _alone(r, g))


def _alone(region: Region, graph: GraphPlan) -> bool:
    if isinstance(region, MatmulRegion):
        return False
    if isinstance(region, ExternRegion):
        return _packet(region.node.attrs["target"]) not in PRODUCTS | LIBRARY
    assert isinstance(region, RowRegion)
    return len([n for n in computed(region) if n.op != "cast"]) < 2


def measure_speed(
    name: str, device: torch.device, samples: int, warmup: int, progress: Progress
) -> dict[str, Any]:
    """Median milliseconds of a step and the raw samples by candidate, interleaved. An entry that
    fails its check is not timed: the dictionary then holds its problems."""
    candidate = Candidate(subgraph(name, Settings(None, DTYPE, device)), Options())
    report = candidate.check(1, progress)
    if not report.passed:
        problems = [f"{v.name}: {p}" for s in report.stages for v in s.tensors for p in v.problems]
        return {"failed": problems}
    result = measure(
        candidate.ready(), name, ("eager", "compile"), samples=samples, warmup=warmup, check=report,
        progress=progress,
    )  # fmt: skip
    return result.to_json()


def medians(record: Mapping[str, Any] | None) -> dict[str, float] | str:
    """Milliseconds by candidate out of what `measure_speed` recorded, or why there are none."""
    if record is None:
        return "not measured"
    if "failed" in record:
        return "failed its check"
    return {label: c["time"]["median"] for label, c in record["candidates"].items()}


def read_speeds(path: Path | None) -> dict[str, Any]:
    """Records by entry out of an earlier run's file; none when there is no such file."""
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text())["entries"]  # type: ignore[no-any-return]


def run(
    names: Sequence[str] | None, speeds: Path | None, samples: int, warmup: int, progress: Progress
) -> tuple[str, bool]:
    """(the document, whether enough is fused). With a GPU, and a file to keep raw samples in,
    entries are timed first. Raises SubgraphError for a name that is none."""
    chosen = list(ENTRIES) if names is None else list(names)
    for name in chosen:
        subgraph(name, Settings())
    records = read_speeds(speeds)
    if torch.cuda.is_available() and speeds is not None:
        device = torch.device("cuda", torch.cuda.current_device())
        for i, name in enumerate(chosen):
            progress(f"timing {name}", i, len(chosen))
            records[name] = measure_speed(name, device, samples, warmup, lambda *_: None)
            write_json(speeds, {"environment": environment(device), "entries": records})
            torch.cuda.empty_cache()
    rows = []
    for i, name in enumerate(chosen):
        progress(f"planning {name}", i, len(chosen))
        rows.append(cover(name, medians(records.get(name))))
    return document(rows, _measured_on(records)), share(rows) >= LEAST_SHARE


def _measured_on(records: Mapping[str, Any]) -> str:
    gpus = sorted({r["environment"]["gpu"]["name"] for r in records.values() if "candidates" in r})
    return f"measured on {', '.join(gpus)}" if gpus else "not measured; needs a GPU and `--speeds`"


_HEAD = """# Coverage

Written by `megafuse coverage`; do not edit. Each entry of the zoo (`src/megafuse/zoo/`) at its GPU
size, bfloat16, forward and backward in one step, planned for an NVIDIA H200.

- **operators**: what eager PyTorch runs, views left out. **regions**: what the plan runs: generated
  row kernels + matrix products + PyTorch calls (a bias may be inside a product).
- **MB**: bytes moved by the plan's own count, each tensor that an operator or a region reads or
  writes once (10^6 bytes); eager → fused.
- **in fused regions**: of the bytes eager moves outside matrix products, convolutions, attention
  kernels and table look-ups, the share that regions of one operator and PyTorch calls do not move.
- **ms**: median of interleaved samples, L2 flushed, as `megafuse bench` takes them; **x**: the time
  of eager, of torch.compile, over megafuse's: above 1 is faster.
"""


def document(rows: Sequence[Row], measured_on: str) -> str:
    """docs/coverage.md."""
    lines = [_HEAD, f"Speed: {measured_on}.", ""]
    lines += ["| entry | operators → regions | MB | fewer bytes | in fused regions "
              "| eager ms | fused ms | x eager | x compile |",
              "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [_line(r) for r in rows]
    lines += [
        "",
        f"All entries: {sum(r.before for r in rows) / 1e9:.1f} GB → "
        f"{sum(r.after for r in rows) / 1e9:.1f} GB; {share(rows):.1%} of the bytes outside "
        f"products and library operators lie in fused regions (wanted: {LEAST_SHARE:.0%}).",
        "", "## Entries", "",
    ]  # fmt: skip
    lines += [f"- `{r.name}`: {r.about}" for r in rows]
    return "\n".join(lines) + "\n"


def _line(r: Row) -> str:
    regions = " + ".join(str(r.regions.get(k, 0)) for k in ("rows", "matmul", "extern"))
    if isinstance(r.speeds, str):
        timed = [r.speeds, "", "", ""]
    else:
        ours, eager = r.speeds[CANDIDATE], r.speeds[LABELS["eager"]]
        rival = r.speeds.get(LABELS["compile"])
        versus = "-" if rival is None else f"{rival / ours:.2f}"
        timed = [f"{eager:.2f}", f"{ours:.2f}", f"{eager / ours:.2f}", versus]
    cells = [
        r.name, f"{r.operators} → {regions}", f"{r.before / 1e6:,.0f} → {r.after / 1e6:,.0f}",
        f"{r.before / r.after:.2f}x", f"{r.share:.0%}" if r.elementwise else "-", *timed,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"
