from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from std_core.cost_model.acceptance import log_odds
from std_core.cost_model.profile import (
    CalibratedDraft,
    LatencyModel,
    Profile,
    RetrievalScore,
    TimedStep,
    fit_non_negative,
)
from std_core.types import Draft

positive = st.floats(0.1, 10)


@given(positive, positive, positive, positive)
def test_a_latency_model_is_recovered_from_its_own_steps(
    scale: float, constant: float, per_token: float, per_entry: float
) -> None:
    true = LatencyModel(scale, constant * 1e-3, per_token * 1e-4, per_entry * 1e-8)
    grid = [(b, t, n) for b in (0.01, 0.02, 0.05) for t in (1, 8, 48) for n in (1e3, 1e5)]
    fitted = LatencyModel.fit([TimedStep(*step, true.seconds(*step)) for step in grid])
    assert fitted.residual.p90 < 1e-3
    for step in grid:
        assert fitted.seconds(*step) == pytest.approx(true.seconds(*step), rel=1e-3)


@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=12))
def test_fitted_coefficients_are_never_negative(rows: list[tuple[float, float, float]]) -> None:
    fit = fit_non_negative([(1.0, *row[:2]) for row in rows], [row[2] for row in rows])
    assert all(c >= 0 for c in fit.coefficients)
    assert 0 <= fit.error.median <= fit.error.p90 + 1e-12


def test_a_column_of_zeros_gets_coefficient_zero() -> None:
    fit = fit_non_negative([(0.0, 1.0), (0.0, 2.0)], [3.0, 6.0])
    assert fit.coefficients == pytest.approx((0.0, 3.0))


def test_a_draft_must_retrieve_nearly_all_that_its_model_retrieves() -> None:
    assert RetrievalScore(512, 32, 30, 27).passes
    assert not RetrievalScore(512, 32, 30, 26).passes
    # a model that answers less than half is no evidence
    assert not RetrievalScore(512, 32, 15, 15).passes


def test_acceptance_comes_from_near_contexts_and_the_same_kind_of_prompt(profile: Profile) -> None:
    std, pair = profile.drafts

    def probabilities(draft: CalibratedDraft, context: int, kind: str) -> tuple[float, ...]:
        return draft.acceptance_curve(context, kind).by_place

    # the other counts are four octaves away
    assert probabilities(std, 512, "caption") == pytest.approx((9.5 / 11,), rel=1e-3)
    assert probabilities(std, 9000, "caption") == pytest.approx((6.5 / 11,), rel=1e-3)
    # in the middle both weigh the same
    assert probabilities(std, 2048, "caption") == pytest.approx((15.5 / 21,))
    # without counts of this kind or sampling the others are used
    captions = std.acceptance_curve(700, "caption")
    assert std.acceptance_curve(700, "question") == captions
    assert std.acceptance_curve(700, "caption", sampled=True) == captions
    sampled = pair.acceptance_curve(1, "question", sampled=True)
    assert sampled.by_place == pytest.approx((0.5, 0.25))


def test_the_union_fraction_is_that_of_the_nearest_batch(profile: Profile) -> None:
    assert profile.union_fraction(Draft("full", channels=0.5), 6) == 0.95
    assert profile.union_fraction(Draft("full", channels=0.3), 6) is None
    assert profile.union_fraction(Draft("std"), 6) is None


def test_agreement_moves_the_acceptance_of_rounds_to_another_keep(profile: Profile) -> None:
    std = profile.drafts[0]
    assert std.keeps == (0.1, 0.2)
    level = std.acceptance_curve(512, "caption").at(0)
    same = std.with_draft(replace(std.draft, gamma=3))
    assert same.acceptance_curve(512, "caption").at(0) == level
    fewer = same.with_draft(replace(std.draft, keep=0.1)).acceptance_curve(512, "caption").at(0)
    shift = log_odds(60.5 / 101) - log_odds(90.5 / 101)
    assert log_odds(fewer) == pytest.approx(log_odds(level) + shift)


def test_a_draft_without_agreement_keeps_what_was_calibrated(profile: Profile) -> None:
    pair = profile.drafts[1]
    assert pair.keeps == (pair.draft.keep,)
