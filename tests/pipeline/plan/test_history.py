from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.choose import DraftPlanner
from pipeline.plan.history import History, prompt_kind
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import (
    DraftOption,
    InputRow,
    RequestError,
    Wave,
)
from std_core.cost_model.acceptance import (
    AcceptanceCounts,
    AcceptanceCurve,
    count_accepted_rejected,
    fit_acceptance_curve,
)
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.profile import (
    CalibratedDraft,
    DraftSetupLatency,
    LatencyModel,
)
from std_core.types import MIN_DRAFTED_ROUNDS, Draft, Result
from tests.pipeline.plan.stub_plan import (
    PROFILE,
    planned_request,
)

DRAFT = Draft("std", gamma=4)


def wave(draft: Draft | None, *prompts: str) -> Wave:
    requests = [
        replace(planned_request(i, 0, 1000, visual=900), input_row=InputRow("v", prompt))
        for i, prompt in enumerate(prompts)
    ]
    return Wave(tuple(requests), 8, draft, (DraftOption(draft, 8, row_round_s=0.1),))


def result(number: int, counts: tuple[int, ...], decode_s: float = 1.0) -> Result:
    """A row; counts[i] of its rounds accepted i of len(counts) - 1 drafted tokens."""
    accepted = sum(i * n for i, n in enumerate(counts))
    rounds = sum(counts)
    tokens = [7] * (accepted + rounds + 1)
    drafted = (len(counts) - 1) * rounds
    return Result(
        str(number),
        token_ids=tokens,
        text="",
        finish_reason="stop",
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        accept_counts=counts,
        reject_counts=(*counts[:-1], 0),
        decode_s=decode_s,
    )


def test_prompts_with_a_question_mark_are_questions() -> None:
    assert prompt_kind("How many? ") == "question"
    assert prompt_kind("What you see: describe it.") == "caption"


def fitted(*results: Result) -> AcceptanceCurve:
    return fit_acceptance_curve(*count_accepted_rejected(results))


def test_acceptance_is_fitted_at_each_position_of_a_round() -> None:
    """From the rounds that reached the position; the position before it counts as one token."""
    every = fitted(result(0, (0, 0, 0, 0, 5))).by_place
    assert every[0] == pytest.approx(5.5 / 6) and every[1] == pytest.approx((5 + every[0]) / 6)
    late = fitted(result(0, (3, 0, 0, 0, 1)), result(1, (2, 0, 0, 0, 4))).by_place
    assert late[0] == pytest.approx(5.5 / 11) and late[3] > late[2] > late[1] > 0.9
    # the end of a row rejects nothing
    cut = fitted(replace(result(0, (2, 1, 0, 0, 1)), reject_counts=(2, 0, 0, 0, 0)))
    assert cut.at(0) == pytest.approx(2.5 / 5) and cut.at(1) == pytest.approx(1.5 / 2)
    # positions that no round reached are left out
    assert fitted(result(0, (7, 0))) == fitted(result(0, (7, 0, 0, 0)))
    assert count_accepted_rejected([]) == ((), ())


def test_evidence_is_the_median_over_waves() -> None:
    history = History()
    for full in (1, 9, 2):
        history = history.with_results(wave(DRAFT, "Describe."), [result(0, (4, 0, 0, 0, full))])
    seen = history.acceptance(DRAFT, "caption")
    assert seen is not None and seen.at(0) == pytest.approx((2 + 0.5) / (2 + 4 + 1))
    assert history.acceptance(Draft("std", gamma=9), "caption") == seen
    assert (
        history.acceptance(DRAFT, "question") is None
        and history.acceptance(Draft("random"), "caption") is None
    )
    assert history.length("caption") == 1 + 6 + 8
    assert history.time_ratio(DRAFT) == pytest.approx(1 / 0.6)  # 6 rounds of 0.1 s took 1 s
    assert history.time_ratio(None) == history.time_ratio(DRAFT)  # without evidence of its own


def test_too_few_rounds_and_errors_are_no_evidence() -> None:
    few = History().with_results(
        wave(DRAFT, "Describe."), [result(0, (MIN_DRAFTED_ROUNDS - 1, 0, 0, 0, 0))]
    )
    assert few.acceptance(DRAFT, "caption") is None and few.time_ratio(DRAFT) == 1
    failed = Result(
        "0", token_ids=[], text="", finish_reason="error", error=RequestError("nan_logits", "x")
    )
    assert History().with_results(wave(DRAFT, "Describe."), [failed]) == History()


def test_a_time_ratio_does_not_depend_on_each_rounds_gamma() -> None:
    """A dense step of 20 ms, 5 ms for every drafted token: γ = 4 is 40 ms."""
    option = DraftOption(DRAFT, 8, row_round_s=0.04, row_draft_token_s=0.005)
    some = replace(wave(DRAFT, "Describe."), options=(option,))
    for rounds, drafted in ((10, 40), (10, 0), (10, 17), (3, 30)):
        took = 2 * (rounds * 0.02 + drafted * 0.005)
        seen = History().with_results(
            some,
            [
                Result(
                    "0",
                    token_ids=[7],
                    text="",
                    finish_reason="stop",
                    rounds=rounds,
                    drafted=drafted,
                    decode_s=took,
                )
            ],
        )
        assert seen.time_ratio(DRAFT) == pytest.approx(2)


def test_dense_rounds_of_a_wave_that_drafts_carry_no_acceptance_statistics() -> None:
    dense = Result("0", token_ids=[7] * 40, text="", finish_reason="stop", rounds=40, decode_s=1.0)
    seen = History().with_results(wave(DRAFT, "Describe."), [dense])
    assert seen.acceptance(DRAFT, "caption") is None and seen.length("caption") == 40
    # 34 of the 40 rounds were dense
    mixed = replace(dense, drafted=8, accepted=3, accept_counts=(37, 3), reject_counts=(3, 0))
    history = History().with_results(wave(DRAFT, "Describe."), [mixed])
    assert history.acceptance(DRAFT, "caption") == AcceptanceCurve((0.5,))


def test_each_kind_of_prompt_in_a_wave_has_its_own_acceptance() -> None:
    history = History().with_results(
        wave(DRAFT, "Describe.", "Why?"), [result(0, (5, 0, 0, 0, 0)), result(1, (0, 0, 0, 0, 5))]
    )
    low = history.acceptance(DRAFT, "caption")
    high = history.acceptance(DRAFT, "question")
    assert low is not None and high is not None and low.at(0) < 0.2 < 0.9 < high.at(0)


def test_results_change_the_next_choice() -> None:
    counts = AcceptanceCounts(1000, "caption", (95,), (5,))
    calibrated = CalibratedDraft(DRAFT, LatencyModel(), DraftSetupLatency(), (counts,))
    profile = replace(PROFILE, latency=LatencyModel(), drafts=(calibrated,))
    summary = WaveSummary(
        8,
        context=60_000.0,
        visual=60_000.0,
        videos=8,
        longest=LongestRequest(60_000, 60_000, 256, sampling="greedy"),
        kinds=(("caption", 8),),
    )

    def chosen(history: History) -> DraftOption:
        return DraftPlanner(profile, history, WaveConfig()).options(summary, 0)[0]

    before = chosen(History())
    assert before.draft is not None and before.draft.gamma > 3
    drafted = wave(DRAFT, "Describe.")
    dense = wave(None, "Describe.")
    rejected = History().with_results(drafted, [result(0, (90, 60, 0, 0, 0))])
    assert chosen(rejected).draft is None
    slow = History().with_results(drafted, [result(0, (0, 0, 0, 0, 9), decode_s=9)])
    slow = slow.with_results(dense, [result(0, (9,), decode_s=0.9)])
    assert chosen(slow).draft is None
    # dense rounds that take ten times as long as predicted; the text has the default length
    all_slow = History().with_results(dense, [result(0, (127,), decode_s=127)])
    assert chosen(all_slow).speedup == pytest.approx(before.speedup, rel=0.01)
