"""How far a candidate is from float64, beside eager, and whether that is close enough.

The policy, with u the unit roundoff of the dtype (2^-8 bfloat16, 2^-11 float16, 2^-24 float32),
e eager's relative Frobenius error on the same seed and m its largest error over the seeds (the
maximum of a small tensor is the noisiest of statistics: at 128 elements eager's own varies twofold
from seed to seed):

    per seed   |candidate - ref|_F / |ref|_F   <= 1.1 e + u/2
    per seed   max|candidate - ref| / rms(ref) <= 1.5 m + u max|ref| / rms(ref)
    pooled     root mean square over 8 seeds   <= 1.05 of eager's
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """The numbers of the policy, in one place."""

    error: float = 1.1
    error_floor: float = 0.5
    peak: float = 1.5
    peak_floor: float = 1.0
    pooled: float = 1.05
    pool_seeds: int = 8


POLICY = Limits()
UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
}
TF32_ROUNDOFF = 2.0**-11
ZERO_IN_THEORY = 2.0**-40
_CHUNK = 1 << 23


@dataclass(frozen=True)
class ErrorSums:
    """Sums over one tensor: enough to state every error without keeping the tensor.

    `scale` is the root mean square of the true values, or None to take it from the reference;
    `new_nonfinite` counts elements that are finite in eager and not in the candidate.
    """

    count: int
    reference_sq: float
    reference_max: float
    candidate_sq: float
    candidate_max: float
    eager_sq: float
    eager_max: float
    new_nonfinite: int
    scale: float | None = None

    @property
    def reference_rms(self) -> float:
        return math.sqrt(self.reference_sq / max(self.count, 1))

    @property
    def eager_rms(self) -> float:
        """Root mean square of eager's absolute error."""
        return math.sqrt(self.eager_sq / max(self.count, 1))

    def scaled(self, scale: float) -> ErrorSums:
        """The same sums, to be judged against `scale` in place of the reference's size."""
        return dataclasses.replace(self, scale=scale)


def measure(
    reference: Tensor, eager: Tensor, candidate: Tensor, scale: float | None = None
) -> ErrorSums:
    """Compare three tensors of one shape element by element in float64, a chunk at a time.

    Elements that are not finite in eager are left out: there is nothing to compare them with.
    """
    flat = [t.detach().reshape(-1) for t in (reference, eager, candidate)]
    size = flat[0].numel()
    sums = torch.zeros(4, dtype=torch.float64, device=reference.device)
    maxima = torch.zeros(3, dtype=torch.float64, device=reference.device)
    bad = torch.zeros((), dtype=torch.int64, device=reference.device)
    for start in range(0, size, _CHUNK):
        ref, eag, cand = (t[start : start + _CHUNK].double() for t in flat)
        comparable = torch.isfinite(eag) & torch.isfinite(ref)
        finite = torch.isfinite(cand)
        bad += (torch.isfinite(eag) & ~finite).sum()
        keep = comparable & finite
        zero = ref.new_zeros(())
        ref = torch.where(keep, ref, zero)
        cand = torch.where(keep, cand, zero).sub_(ref).abs_()
        eag = torch.where(keep, eag, zero).sub_(ref).abs_()
        ref.abs_()
        sums += torch.stack([ref.dot(ref), cand.dot(cand), eag.dot(eag), keep.sum().double()])
        maxima = torch.maximum(maxima, torch.stack([ref.max(), cand.max(), eag.max()]))
    ref_sq, cand_sq, eag_sq, count = sums.tolist()
    ref_max, cand_max, eag_max = maxima.tolist()
    return ErrorSums(
        int(count), ref_sq, ref_max, cand_sq, cand_max, eag_sq, eag_max, int(bad), scale
    )


@dataclass(frozen=True)
class TensorVerdict:
    """One output or gradient: the worst seed's errors with their limits, and the pooled error.

    Errors are relative to the root mean square of the float64 reference; where that is zero in
    theory (`absolute`), to the size of the terms that cancel.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    eager_error: float
    error_limit: float
    max_error: float
    eager_max_error: float
    max_limit: float
    pooled: float
    eager_pooled: float
    pooled_limit: float | None
    absolute: bool
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(
    name: str,
    shape: tuple[int, ...],
    seeds: Sequence[ErrorSums],
    u: float,
    structural: Sequence[str] = (),
    *,
    limits: Limits = POLICY,
) -> TensorVerdict:
    """Apply the policy to one tensor's sums, one entry a seed.

    `structural` holds problems found before any number was compared (a wrong shape, a missing
    gradient, two runs that differ).
    """
    rows = [_Row.of(s) for s in seeds]
    problems = list(structural)
    bad = sum(s.new_nonfinite for s in seeds)
    if bad:
        problems.append(f"{bad} non-finite value{'s' * (bad > 1)} that eager does not have")
    if not rows:
        rows = [_Row(*[math.nan] * 6)]
    pooled, eager_pooled = _rms([r.error for r in rows]), _rms([r.eager for r in rows])
    absolute = any(s.scale is not None for s in seeds)

    eager_peak = max(r.eager_peak for r in rows)

    def error_limit(row: _Row) -> float:
        return limits.error * row.eager + limits.error_floor * u

    def peak_limit(row: _Row) -> float:
        return limits.peak * eager_peak + limits.peak_floor * u * row.largest

    worst = max(rows, key=lambda r: _over(r.error, error_limit(r)))
    peak = max(rows, key=lambda r: _over(r.peak, peak_limit(r)))
    if worst.error > error_limit(worst):
        problems.append(f"relative error {worst.error:.2e} is above {error_limit(worst):.2e}")
    if peak.peak > peak_limit(peak):
        problems.append(f"largest error {peak.peak:.2e} rms is above {peak_limit(peak):.2e}")
    pooled_limit: float | None = None
    if len(seeds) >= limits.pool_seeds:
        # Where the true value is zero there is noise on both sides; only its size can be asked.
        floor = limits.error_floor * u if absolute else 0.0
        pooled_limit = limits.pooled * eager_pooled + floor
        if pooled > pooled_limit:
            text = f"error pooled over {len(rows)} seeds {pooled:.2e} is above {pooled_limit:.2e}"
            problems.append(text)
    return TensorVerdict(
        name=name,
        shape=shape,
        error=worst.error,
        eager_error=worst.eager,
        error_limit=error_limit(worst),
        max_error=peak.peak,
        eager_max_error=peak.eager_peak,
        max_limit=peak_limit(peak),
        pooled=pooled,
        eager_pooled=eager_pooled,
        pooled_limit=pooled_limit,
        absolute=absolute,
        problems=tuple(problems),
    )


class _Row(NamedTuple):
    """One seed's errors, relative to the size of the true values."""

    error: float
    eager: float
    peak: float
    eager_peak: float
    largest: float
    elements: float

    @classmethod
    def of(cls, s: ErrorSums) -> _Row:
        scale = s.reference_rms if s.scale is None else s.scale
        root = math.sqrt(max(s.count, 1))
        return cls(
            error=_over(math.sqrt(s.candidate_sq) / root, scale),
            eager=_over(math.sqrt(s.eager_sq) / root, scale),
            peak=_over(s.candidate_max, scale),
            eager_peak=_over(s.eager_max, scale),
            largest=max(_over(s.reference_max, scale), 0.0 if s.scale is None else 1.0),
            elements=s.count,
        )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def _over(value: float, scale: float) -> float:
    if scale > 0:
        return value / scale
    return 0.0 if value == 0 else math.inf
