import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafuse.tools import accuracy
from megafuse.tools.accuracy import ErrorSums, judge, measure

U = accuracy.UNIT_ROUNDOFF[torch.bfloat16]


def sums(candidate, eager, count=1000, **kwargs):
    """Reference of rms 1; errors of the given rms, their maxima four times that."""
    return ErrorSums(
        count, count, 4.0, count * candidate**2, 4 * candidate, count * eager**2, 4 * eager, 0,
        **kwargs,
    )  # fmt: skip


def test_measure_agrees_with_the_definition_across_chunks(monkeypatch):
    monkeypatch.setattr(accuracy, "_CHUNK", 7)
    torch.manual_seed(0)
    exact = torch.randn(5, 9, dtype=torch.float64)
    eager, candidate = exact.bfloat16(), (exact + 0.01).bfloat16()
    found = measure(exact, eager, candidate)
    error = candidate.double() - exact
    assert found.count == 45
    assert found.candidate_sq == pytest.approx(error.square().sum().item())
    assert found.candidate_max == pytest.approx(error.abs().max().item())
    assert found.eager_sq == pytest.approx((eager.double() - exact).square().sum().item())
    assert found.reference_max == pytest.approx(exact.abs().max().item())


def test_non_finite_counts_only_where_eager_is_finite():
    exact = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    eager = torch.tensor([1.0, math.inf, 3.0, 4.0])
    candidate = torch.tensor([1.0, math.inf, math.nan, 4.0])
    found = measure(exact, eager, candidate)
    assert found.new_nonfinite == 1
    assert found.count == 2
    assert found.candidate_sq == 0
    verdict = judge("y", (4,), [found], U)
    assert not verdict.passed
    assert "non-finite" in verdict.problems[0]


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.09, True), (1.2, False)])
def test_relative_error_limit(factor, passed):
    eager = 100 * U  # large, so that the floor of u/2 is small beside it
    entry = sums(factor * eager, eager, count=10**6)
    assert judge("y", (10**6,), [entry], U).passed is passed


def test_floor_forgives_half_a_roundoff():
    assert judge("y", (10**6,), [sums(0.49 * U, 0.0, count=10**6)], U).passed
    assert not judge("y", (10**6,), [sums(0.51 * U, 0.0, count=10**6)], U).passed


def test_every_seed_is_judged_against_eager_on_that_seed():
    typical, lucky = sums(U, U), sums(U, U / 50)
    assert judge("y", (1000,), [typical] * 4, U).passed
    assert not judge("y", (1000,), [typical] * 3 + [lucky], U).passed


def test_largest_error_is_judged_on_its_own():
    good = sums(U, U)
    spike = ErrorSums(1000, 1000, 4.0, good.candidate_sq, 26 * U, good.eager_sq, 4 * U, 0)
    verdict = judge("y", (1000,), [spike], U)
    assert verdict.problems == ("largest error 1.02e-01 rms is above 3.91e-02",)


def test_pooled_error_is_judged_from_eight_seeds_on():
    eager = 10 * U
    seeds = [sums(1.09 * eager, eager, count=10**6)] * 8
    assert judge("y", (10**6,), seeds[:7], U).passed
    verdict = judge("y", (10**6,), seeds, U)
    assert not verdict.passed
    assert "pooled over 8 seeds" in verdict.problems[0]


def test_pooled_limit_has_no_allowance():
    verdict = judge("y", (8,), [sums(U, U, count=8)] * 8, U)
    assert verdict.pooled_limit == pytest.approx(1.05 * U)


def test_zero_reference():
    zero = ErrorSums(10, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    assert judge("y", (10,), [zero], U).passed
    wrong = ErrorSums(10, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0)
    assert not judge("y", (10,), [wrong], U).passed


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 0.1), st.floats(1e-3, 1e3), st.sampled_from(list(accuracy.UNIT_ROUNDOFF)))
def test_a_candidate_equal_to_eager_always_passes(eager, size, dtype):
    u = accuracy.UNIT_ROUNDOFF[dtype]
    count = 64
    error = eager * size
    entry = ErrorSums(
        count,
        count * size**2,
        3 * size,
        count * error**2,
        3 * error,
        count * error**2,
        3 * error,
        0,
    )
    assert judge("y", (64,), [entry] * 8, u).passed
