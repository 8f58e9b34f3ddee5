from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from std_core.cost_model.acceptance import (
    AcceptanceCurve,
    KeepAgreement,
    agreement_log_odds,
    fit_acceptance_curve,
    log_odds,
)

COUNTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(st.floats(0, 1), st.integers(0, 12))
def test_expected_tokens_of_a_constant_acceptance_are_a_geometric_sum(
    acceptance: float, gamma: int
) -> None:
    tokens = AcceptanceCurve((acceptance,)).tokens(gamma)
    assert tokens == pytest.approx(sum(acceptance**i for i in range(gamma + 1)))


@given(st.floats(0.01, 0.99), st.integers(0, 12), st.integers(1, 5))
def test_a_curve_of_equal_probabilities_is_a_constant_acceptance(
    a: float, gamma: int, places: int
) -> None:
    curve = AcceptanceCurve((a,) * places)
    assert curve.tokens(gamma) == pytest.approx((1 - a ** (gamma + 1)) / (1 - a))
    assert curve.rate(gamma) == pytest.approx(a if gamma else 0.0)


@given(COUNTS, st.floats(0.02, 0.98), st.integers(1, 14))
def test_rescaling_changes_the_odds_of_all_places_alike(
    counts: list[tuple[int, int]], first: float, gamma: int
) -> None:
    curve = fit_acceptance_curve(*zip(*counts, strict=True))
    assert all(0 < p < 1 for p in curve.by_place)
    rescaled = curve.rescaled(first)
    assert rescaled.at(0) == pytest.approx(first)
    assert rescaled.rescaled(curve.at(0)).by_place == pytest.approx(curve.by_place)
    higher, lower = (rescaled, curve) if first >= curve.at(0) else (curve, rescaled)
    assert higher.tokens(gamma) >= lower.tokens(gamma) * (1 - 1e-12)
    assert 1 < curve.tokens(gamma) < gamma + 1
    assert curve.tokens(gamma) <= curve.tokens(gamma + 1)


@given(
    st.lists(st.floats(0.02, 0.98), min_size=1, max_size=6), st.integers(0, 8), st.integers(40, 80)
)
def test_expected_rounds_agree_with_the_exact_recursion(
    places: list[float], gamma: int, tokens: int
) -> None:
    """Exact: a round writes k tokens with probability p_k and leaves the rest to later rounds."""
    curve = AcceptanceCurve(tuple(places))
    survival = [math.prod(map(curve.at, range(place))) for place in range(gamma + 2)]
    exactly = [survival[k - 1] - (survival[k] if k <= gamma else 0.0) for k in range(1, gamma + 2)]
    rounds = [0.0]
    for left in range(1, tokens + 1):
        rounds.append(1 + sum(p * rounds[max(0, left - k)] for k, p in enumerate(exactly, 1)))
    assert curve.rounds(tokens, gamma) == pytest.approx(rounds[tokens], rel=0.05)
    assert curve.rounds(0.5, gamma) >= 1
    assert AcceptanceCurve((0.0,)).rounds(tokens, gamma) == tokens


def test_prompt_lookup_is_wrong_at_once_or_right_for_long() -> None:
    """Counts of a run: 201 of 347 rounds were rejected at once, 58 accepted to the end. The curve
    gives the run's tokens per round at every γ; no single acceptance does."""
    ends = (201, 39, 11, 14, 8, 7, 5, 4)
    survivors = [58 + sum(ends[place:]) for place in range(9)]
    curve = fit_acceptance_curve(survivors[1:], ends)
    for gamma in range(1, 9):
        measured = sum(survivors[: gamma + 1]) / survivors[0]
        assert curve.tokens(gamma) == pytest.approx(measured, rel=0.01)
    assert curve.rate(8) > curve.rate(2) + 0.1


AGREEMENTS = st.lists(
    st.builds(
        lambda keep, agreed, missed: KeepAgreement(keep, 512, agreed, agreed + missed),
        st.sampled_from([0.05, 0.1, 0.2, 0.5]),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=8,
)


@given(AGREEMENTS, st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_agreement_never_falls_as_more_is_kept(
    agreements: list[KeepAgreement], keeps: list[float]
) -> None:
    fit = agreement_log_odds(agreements, [1.0] * len(agreements))
    odds = [fit.at(keep) for keep in sorted(keeps)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(odds))
    assert all(math.isfinite(value) for value in odds)


def test_agreement_is_interpolated_between_measured_keeps() -> None:
    low = KeepAgreement(0.1, context=512, agreed=60, tokens=100)
    high = KeepAgreement(0.4, context=512, agreed=90, tokens=100)
    fit = agreement_log_odds([high, low], [1.0, 1.0])
    ends = [log_odds(60.5 / 101), log_odds(90.5 / 101)]
    assert [fit.at(0.05), fit.at(0.1)] == [ends[0]] * 2
    assert fit.at(0.2) == pytest.approx(sum(ends) / 2)  # the geometric mean of 0.1 and 0.4
    assert [fit.at(0.4), fit.at(0.9)] == [ends[1]] * 2


def test_keeps_whose_agreement_falls_are_pooled() -> None:
    counts = ((0.1, 50), (0.2, 40), (0.4, 90))
    agreements = [KeepAgreement(keep, 512, agreed, 100) for keep, agreed in counts]
    fit = agreement_log_odds(agreements, [1.0] * 3)
    assert fit.at(0.1) == fit.at(0.2) == log_odds(90.5 / 201)
