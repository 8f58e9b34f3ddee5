from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.choice import Mix, Setting, choose
from pipeline.history import ROUNDS, History, acceptance, kind_of
from pipeline.types import Candidate, FramePlan, Item, Planned, RequestError, VideoInfo, Wave
from std_core.account import Account
from std_core.profile import Accepted, Cost, Device, Profile, Tried
from std_core.types import Draft, Result

DRAFT = Draft("std", gamma=4)
INFO = VideoInfo("v", 1, "1", "mp4", "h264", 1.0, 0.0, 8, True, 8.0, 56, 56, 0)


def wave(draft: Draft | None, *prompts: str) -> Wave:
    plan = FramePlan((0.0,), 56, 56, 1.0, 900)
    requests = [Planned(str(i), Item("v", prompt), INFO, plan, 1000) for i, prompt in enumerate(prompts)]
    return Wave(tuple(requests), 8, draft, (Candidate(draft, 8, round_s=0.1),))


def result(number: int, counts: tuple[int, ...], decode_s: float = 1.0) -> Result:
    accepted = sum(i * n for i, n in enumerate(counts))
    rounds = sum(counts)
    tokens = [7] * (accepted + rounds + 1)
    return Result(
        str(number), tokens, "", "stop", rounds=rounds, accepted=accepted, accept_counts=counts, decode_s=decode_s
    )


def test_prompts_that_ask_are_questions() -> None:
    assert kind_of("How many? ") == "question" and kind_of("What you see: describe it.") == "caption"


def test_acceptance_is_what_was_accepted_over_what_was_judged() -> None:
    assert acceptance([result(0, (0, 0, 0, 0, 5))]) == pytest.approx(20.5 / 21)
    assert acceptance([result(0, (3, 0, 0, 0, 1))]) == pytest.approx(4.5 / 7)  # a row's end is no refusal


def test_waves_are_remembered_by_their_median() -> None:
    history = History()
    for full in (1, 9, 2):
        history = history.observed(wave(DRAFT, "Describe."), [result(0, (4, 0, 0, 0, full))])
    assert history.acceptance(DRAFT, "caption") == pytest.approx((8 + 0.5) / (8 + 3 + 1))
    assert history.acceptance(Draft("std", gamma=9), "caption") == history.acceptance(DRAFT, "caption")
    assert history.acceptance(DRAFT, "question") is None and history.acceptance(Draft("random"), "caption") is None
    assert history.length("caption") == 1 + 6 + 8
    assert history.speed(DRAFT) == pytest.approx(1 / 0.6)  # 6 rounds of 0.1 s took 1 s
    assert history.speed(None) == history.speed(DRAFT)  # for want of its own


def test_too_few_rounds_and_errors_say_nothing() -> None:
    few = History().observed(wave(DRAFT, "Describe."), [result(0, (ROUNDS - 1, 0, 0, 0, 0))])
    assert few.acceptance(DRAFT, "caption") is None and few.speed(DRAFT) == 1
    failed = Result("0", [], "", "error", error=RequestError("nan_logits", "x"))
    assert History().observed(wave(DRAFT, "Describe."), [failed]) == History()


def test_kinds_are_told_apart_in_one_wave() -> None:
    history = History().observed(
        wave(DRAFT, "Describe.", "Why?"), [result(0, (5, 0, 0, 0, 0)), result(1, (0, 0, 0, 0, 5))]
    )
    low, high = history.acceptance(DRAFT, "caption"), history.acceptance(DRAFT, "question")
    assert low is not None and high is not None and low < 0.2 < 0.9 < high


def test_what_was_seen_changes_the_choice() -> None:
    account = Account(32, 4096, 14336, 32, 8, 128, 128256, parameters=8_030_000_000)
    tried = Tried(DRAFT, Cost(), (0.0, 0.0), (Accepted(1000, "caption", 95, 5),))
    device = Device("A100", "cuda", 2e12, 80e9, 312e12)
    profile = Profile(device, "m", "bfloat16", account, Cost(), (0.0, 0.0, 0.0), 0.0, (tried,))
    setting = Setting()
    plan = FramePlan((0.0,), 56, 56, 1.0, 60_000)
    infos = [replace(INFO, uri=str(i)) for i in range(8)]
    some = Mix.of([Planned(i.uri, Item(i.uri, "Describe."), i, plan, 60_000) for i in infos], setting)
    before = choose(some, profile, History(), setting, 0)[0]
    assert before.draft is not None and before.draft.gamma > 3
    seen = History().observed(wave(DRAFT, "Describe."), [result(0, (90, 60, 0, 0, 0))])
    assert choose(some, profile, seen, setting, 0)[0].draft is None
    dense = wave(None, "Describe.")
    slow = History().observed(wave(DRAFT, "Describe."), [result(0, (0, 0, 0, 0, 9), decode_s=9)])
    slow = slow.observed(dense, [result(0, (9,), decode_s=0.9)])
    assert choose(some, profile, slow, setting, 0)[0].draft is None
    both = History().observed(dense, [result(0, (9,), decode_s=9)])
    assert choose(some, profile, both, setting, 0)[0].gain == pytest.approx(before.gain, rel=0.01)
