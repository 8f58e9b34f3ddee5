from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.choose import DraftPlanner
from pipeline.plan.history import History, prompt_kind
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import (
    DraftOption,
    FramePlan,
    InputRow,
    PlannedRequest,
    RequestError,
    VideoInfo,
    Wave,
)
from std_core.cost_model.account import AcceptanceCurve, ModelSize, chances, count_accepted_rejected
from std_core.cost_model.profile import Accepted, CalibratedDraft, Cost, Device, Profile
from std_core.types import ROUNDS, Draft, Result

DRAFT = Draft("std", gamma=4)
INFO = VideoInfo(
    "v",
    size_bytes=1,
    version="1",
    container="mp4",
    codec="h264",
    duration=1.0,
    start=0.0,
    frames=8,
    exact=True,
    fps=8.0,
    height=56,
    width=56,
    rotation=0,
)


def wave(draft: Draft | None, *prompts: str) -> Wave:
    plan = FramePlan((0.0,), height=56, width=56, fps=1.0, tokens=900)
    requests = [
        PlannedRequest(
            str(i), input_row=InputRow("v", prompt), info=INFO, frame_plan=plan, context=1000
        )
        for i, prompt in enumerate(prompts)
    ]
    return Wave(tuple(requests), 8, draft, (DraftOption(draft, 8, row_round_s=0.1),))


def result(number: int, counts: tuple[int, ...], decode_s: float = 1.0) -> Result:
    """Of a row with so many rounds in which i of len(counts) - 1 tokens were accepted."""
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


def test_prompts_that_ask_are_questions() -> None:
    assert (
        prompt_kind("How many? ") == "question"
        and prompt_kind("What you see: describe it.") == "caption"
    )


def seen(*results: Result) -> AcceptanceCurve:
    return fit_acceptance_curve(*count_accepted_rejected(results))


def test_chances_are_of_each_place_in_a_round() -> None:
    """Of those rounds that came so far; a place is taken to be like the one before it, as if one
    more token said so."""
    every = seen(result(0, (0, 0, 0, 0, 5))).by_place
    assert every[0] == pytest.approx(5.5 / 6) and every[1] == pytest.approx((5 + every[0]) / 6)
    late = seen(result(0, (3, 0, 0, 0, 1)), result(1, (2, 0, 0, 0, 4))).by_place
    assert late[0] == pytest.approx(5.5 / 11) and late[3] > late[2] > late[1] > 0.9
    cut = seen(
        replace(result(0, (2, 1, 0, 0, 1)), reject_counts=(2, 0, 0, 0, 0))
    )  # a row's end is no refusal
    assert cut.at(0) == pytest.approx(2.5 / 5) and cut.at(1) == pytest.approx(1.5 / 2)
    assert seen(result(0, (7, 0))) == seen(result(0, (7, 0, 0, 0)))  # whatever nobody came to
    assert count_accepted_rejected([]) == ((), ())


def test_waves_are_remembered_by_their_median() -> None:
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
    assert history.time_ratio(None) == history.time_ratio(DRAFT)  # for want of its own


def test_too_few_rounds_and_errors_say_nothing() -> None:
    few = History().with_results(wave(DRAFT, "Describe."), [result(0, (ROUNDS - 1, 0, 0, 0, 0))])
    assert few.acceptance(DRAFT, "caption") is None and few.time_ratio(DRAFT) == 1
    failed = Result(
        "0", token_ids=[], text="", finish_reason="error", error=RequestError("nan_logits", "x")
    )
    assert History().with_results(wave(DRAFT, "Describe."), [failed]) == History()


def test_a_speed_is_the_same_whatever_each_rounds_gamma_was() -> None:
    """A dense step of 20 ms, 5 ms for every drafted token: γ = 4 is 40 ms."""
    way = DraftOption(DRAFT, 8, row_round_s=0.04, row_draft_token_s=0.005)
    some = replace(wave(DRAFT, "Describe."), options=(way,))
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


def test_dense_rounds_of_a_wave_that_drafts_say_nothing_of_its_acceptance() -> None:
    dense = Result("0", token_ids=[7] * 40, text="", finish_reason="stop", rounds=40, decode_s=1.0)
    seen = History().with_results(wave(DRAFT, "Describe."), [dense])
    assert seen.acceptance(DRAFT, "caption") is None and seen.length("caption") == 40
    some = replace(
        dense, drafted=8, accepted=3, accept_counts=(37, 3), reject_counts=(3, 0)
    )  # 34 of them were dense
    assert History().with_results(wave(DRAFT, "Describe."), [some]).acceptance(
        DRAFT, "caption"
    ) == AcceptanceCurve((0.5,))


def test_kinds_are_told_apart_in_one_wave() -> None:
    history = History().with_results(
        wave(DRAFT, "Describe.", "Why?"), [result(0, (5, 0, 0, 0, 0)), result(1, (0, 0, 0, 0, 5))]
    )
    low = history.acceptance(DRAFT, "caption")
    high = history.acceptance(DRAFT, "question")
    assert low is not None and high is not None and low.at(0) < 0.2 < 0.9 < high.at(0)


def test_what_was_seen_changes_the_choice() -> None:
    model_size = ModelSize(
        32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=128256,
        parameters=8_030_000_000,
    )
    calibrated = CalibratedDraft(
        DRAFT, Cost(), (0.0, 0.0), (Accepted(1000, "caption", (95,), (5,)),)
    )
    device = Device("A100", kind="cuda", bandwidth=2e12, memory=80e9, flops=312e12)
    profile = Profile(
        device,
        model="m",
        dtype="bfloat16",
        account=account,
        full=Cost(),
        prefill=(0.0, 0.0, 0.0),
        vision=0.0,
        drafts=(calibrated,),
    )
    config = WaveConfig()
    plan = FramePlan((0.0,), height=56, width=56, fps=1.0, tokens=60_000)
    infos = [replace(INFO, uri=str(i)) for i in range(8)]
    some = WaveSummary.of(
        [
            PlannedRequest(
                i.uri,
                input_row=InputRow(i.uri, "Describe."),
                info=i,
                frame_plan=plan,
                context=60_000,
            )
            for i in infos
        ],
        config,
    )
    before = DraftPlanner(profile, History(), config).options(some, 0)[0]
    assert before.draft is not None and before.draft.gamma > 3
    seen = History().with_results(wave(DRAFT, "Describe."), [result(0, (90, 60, 0, 0, 0))])
    assert DraftPlanner(profile, seen, config).options(some, 0)[0].draft is None
    dense = wave(None, "Describe.")
    slow = History().with_results(
        wave(DRAFT, "Describe."), [result(0, (0, 0, 0, 0, 9), decode_s=9)]
    )
    slow = slow.with_results(dense, [result(0, (9,), decode_s=0.9)])
    assert DraftPlanner(profile, slow, config).options(some, 0)[0].draft is None
    both = History().with_results(dense, [result(0, (127,), decode_s=127)])  # as long as is usual
    assert DraftPlanner(profile, both, config).options(some, 0)[0].speedup == pytest.approx(
        before.speedup, rel=0.01
    )
