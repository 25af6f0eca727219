"""Find the fusion that broke something: binary search over MEGAFUSE_FUEL, the check as the judge.

With fuel n a plan holds its first n fusions, forward's before backward's. If the check passes with
none and fails with all, some n passes where n + 1 fails, and fusion n + 1 is the one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megafuse.errors import CaptureError, InputError, MegafuseError, UnsupportedError
from megafuse.fusion.describe import lines_of
from megafuse.fusion.plan import MatmulRegion, Merge, RowRegion
from megafuse.fusion.summary import Direction
from megafuse.tools.candidate import Candidate, Progress
from megafuse.tools.check import check_cases

if TYPE_CHECKING:
    from megafuse.compiler import Plan


@dataclass(frozen=True)
class Probe:
    """What the check said of the plan with `fuel` fusions; problems: empty where it passed."""

    fuel: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass
class Finding:
    """probes: in the order taken. bad: the number of the first bad fusion, counted from 1, or None:
    then the check passes with all, or fails with none. merge, direction: that fusion; clean:
    whether it is the only difference between the two plans."""

    total: int
    probes: list[Probe] = field(default_factory=list)
    bad: int | None = None
    merge: Merge | None = None
    direction: Direction = "forward"
    clean: bool = True

    @property
    def passed(self) -> bool:
        """Whether there is nothing to find."""
        return bool(self.probes) and self.probes[0].passed

    def __str__(self) -> str:
        return "\n".join(_report(self))


def bisect(candidate: Candidate, seeds: int = 1, progress: Progress | None = None) -> Finding:
    """Search between no fusion and all of them, in the precision where all of them fail.

    Raises what the subgraph raises on its own: CaptureError, UnsupportedError, InputError.
    """
    say = progress or (lambda *_: None)
    dtype, problems = _failing_precision(candidate, seeds)
    full = _plan(candidate, dtype, None)
    total = len(_merges(full)) if full else _gallop(candidate, dtype, seeds)
    finding = Finding(total, [Probe(total, problems)])
    if not problems:
        return finding

    def passes(fuel: int) -> bool:
        say(f"checking {fuel} of {total} fusions", len(finding.probes), total.bit_length() + 2)
        probe = Probe(fuel, _problems(candidate, dtype, seeds, fuel))
        finding.probes.append(probe)
        return probe.passed

    if total == 0 or not passes(0):
        return finding
    finding.bad = first_bad(passes, total)
    before, after = (_plan(candidate, dtype, n) for n in (finding.bad - 1, finding.bad))
    if after is not None:
        made = _merges(after)
        finding.direction, finding.merge = made[min(finding.bad, len(made)) - 1]
        finding.clean = before is not None and _same(_merges(before), made[:-1])
    return finding


def first_bad(passes: Callable[[int], bool], total: int) -> int:
    """The least n found with passes(n - 1) and not passes(n), given that 0 passes and `total` does
    not; one where the answers change once."""
    good, bad = 0, total
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return bad


def _with_fuel(candidate: Candidate, fuel: int | None) -> Candidate:
    options = dataclasses.replace(candidate.options, fuel=fuel)
    return Candidate(candidate.subgraph, options, candidate.seed, candidate.fuse)


def _failing_precision(
    candidate: Candidate, seeds: int
) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """The first precision in which the plan with every fusion fails; None is the case's own."""
    own = _problems(candidate, None, seeds, None)
    if own:
        return None, own
    return torch.float32, _problems(candidate, torch.float32, seeds, None)


def _problems(
    candidate: Candidate, dtype: torch.dtype | None, seeds: int, fuel: int | None
) -> tuple[str, ...]:
    """What is wrong with the plan with `fuel` fusions; a compiler that gives up is wrong too."""
    limited = _with_fuel(candidate, fuel)
    chosen = range(candidate.seed, candidate.seed + seeds)
    try:
        report = check_cases(lambda seed, _: limited.make(seed, dtype), chosen, float32=False)
    except (CaptureError, UnsupportedError, InputError):
        raise  # of the subgraph itself
    except Exception as error:
        if isinstance(error, MegafuseError) and not _ours(error):
            raise
        first = (str(error).splitlines() or [""])[0]
        return (f"{type(error).__name__}: {first}",)
    return report.failures


def _ours(error: MegafuseError) -> bool:
    from megafuse.errors import BuildError, InvariantError

    return isinstance(error, BuildError | InvariantError)


def _plan(candidate: Candidate, dtype: torch.dtype | None, fuel: int | None) -> Plan | None:
    """The plan of the first seed, not compiled; None where planning itself fails."""
    from megafuse.api import fuse

    case = candidate.subgraph.case(candidate.seed, dtype)
    options = dataclasses.replace(candidate.options, fuel=fuel)
    try:
        fused = fuse(case.module, *case.args, options=options, **case.kwargs)
    except (CaptureError, UnsupportedError, InputError):
        raise
    except Exception:  # a broken rule may break anything
        return None
    plans = [c for same in fused._plans.values() for c in same]
    if not plans:
        raise InputError("this call runs the original module; there is no fusion to search")
    return plans[-1].plan


def _gallop(candidate: Candidate, dtype: torch.dtype | None, seeds: int) -> int:
    """A number of fusions with which planning fails, when it fails with all of them."""
    fuel = 1
    while _plan(candidate, dtype, fuel) is not None:
        fuel *= 2
    return fuel


def _merges(plan: Plan) -> list[tuple[Direction, Merge]]:
    parts = [p for p in (plan.forward, plan.backward) if p is not None]
    return [(p.direction, m) for p in parts for m in p.merges]


def _same(a: Sequence[tuple[Direction, Merge]], b: Sequence[tuple[Direction, Merge]]) -> bool:
    def names(merges: Sequence[tuple[Direction, Merge]]) -> list[list[str]]:
        return [[n for side in (m.first, m.second) for n in _names(side)] for _, m in merges]

    return names(a) == names(b)


def _report(finding: Finding) -> list[str]:
    probes, total = finding.probes, finding.total
    if finding.passed:
        return [f"The check passes with all {total} fusions: there is nothing to find."]
    lines = [f"With all {total} fusions the check fails:",
             *(f"    {text}" for text in probes[0].problems[:4])]  # fmt: skip
    if finding.bad is None:
        return [*lines, "With none it fails too: the fault is not a fusion but in the capture, an "
                "operator or a product.", "MEGAFUSE_DUMP=dir writes every stage."]  # fmt: skip
    lines += [f"  {p.fuel:>4} fusions: {'pass' if p.passed else p.problems[0]}" for p in probes[1:]]
    lines += ["", f"First bad: fusion {finding.bad} of {total}, in {finding.direction}"]
    merge = finding.merge
    if merge is None:
        return [*lines, "  with which the planner itself fails"]
    lines.append(f"  by the rule {_rule(merge)}, which joined")
    lines += [*_side(merge.first, finding.direction), "  with"]
    lines += _side(merge.second, finding.direction)
    if not finding.clean:
        lines.append("  (the two plans differ in more than this fusion)")
    good = finding.bad - 1
    return [*lines, "", f"MEGAFUSE_FUEL={good} passes, MEGAFUSE_FUEL={finding.bad} fails."]


def _rule(merge: Merge) -> str:
    """The file of the rule that joined two regions."""
    first, result = merge.first, merge.result
    if isinstance(first, MatmulRegion) or isinstance(result, MatmulRegion):
        return "fusion/tails.py"
    more = len(result.stages) > max(len(first.stages), len(merge.second.stages))
    return f"fusion/rules/{'group' if more else 'same_rows'}.py"


def _names(region: RowRegion | MatmulRegion) -> list[str]:
    if isinstance(region, MatmulRegion):
        return [region.node.name]
    return [r.node.name for r in region.roots]


def _side(region: RowRegion | MatmulRegion, direction: Direction) -> list[str]:
    lines = [f"    {line}: {', '.join(line.ops)}" for line in lines_of(region, direction)]
    if isinstance(region, MatmulRegion):
        return [*lines, f"    results: {region.node.name} (product)"]
    results = ", ".join(f"{r.node.name} ({r.kind})" for r in region.roots)
    return [*lines, f"    results: {results}"]
