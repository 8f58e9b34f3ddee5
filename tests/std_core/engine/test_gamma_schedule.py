"""Rounds whose γ follows the number of running rows and recent acceptance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.decoding.accept import accept_equal
from std_core.decoding.round import Round
from std_core.engine.batch import RECENT_ROUNDS, Batch
from std_core.engine.engine import Engine
from std_core.kernels.cpu import loader
from std_core.types import (
    MIN_DRAFTED_ROUNDS,
    Draft,
    FirstTokens,
    GammaSchedule,
    Request,
    Result,
    Sampling,
)

MAX_GAMMA = 6
DRAFTS = {
    "target": Draft("full", depth=0.4, gamma=MAX_GAMMA),
    "selected": Draft("std", keep=0.2, gamma=MAX_GAMMA),
    "refresh": Draft("snapkv", keep=0.2, refresh=2, gamma=MAX_GAMMA),
    "draft_model": Draft("std", keep=0.3, gamma=MAX_GAMMA, model="second"),
    "ngram": Draft("ngram", gamma=MAX_GAMMA),
}
Tokens = dict[str, list[int]]  # by request id
DraftOf = Callable[[str], Draft]


class RoundRecord(NamedTuple):
    """What a test sees of a round."""

    running: int
    gamma: int
    first_tokens: FirstTokens


def schedules(max_gamma: int = MAX_GAMMA) -> st.SearchStrategy[GammaSchedule]:
    """Schedules for up to three slots, those of the fixture `engine`."""
    classes = st.lists(st.integers(0, max_gamma), min_size=1, max_size=5).map(tuple)
    gammas = st.lists(classes, min_size=1, max_size=3).map(tuple)
    return st.builds(GammaSchedule, gammas, st.floats(0, 1))


def tokens_by_id(results: Iterable[Result]) -> Tokens:
    return {result.request_id: result.token_ids for result in results}


def with_limits(requests: list[Request], limits: Iterable[int]) -> list[Request]:
    """As many requests as limits, each with its own maximum of tokens."""
    return [replace(r, sampling=Sampling(n)) for r, n in zip(requests, limits, strict=False)]


def record_rounds(patch: pytest.MonkeyPatch) -> list[RoundRecord]:
    """Record all rounds from now on."""
    records: list[RoundRecord] = []
    decode = Batch._decode

    def recorded_decode(batch: Batch, gamma: int) -> Round:
        done = decode(batch, gamma)
        slots = [slot for slot, row in enumerate(batch.rows) if row is not None]
        first_tokens = FirstTokens(
            accepted=sum(int(done.accepted[slot] > 0) for slot in slots),
            rejected=sum(int(done.accepted[slot] == 0 < done.proposed[slot]) for slot in slots),
        )
        records.append(RoundRecord(len(slots), gamma, first_tokens))
        return done

    patch.setattr(Batch, "_decode", recorded_decode)
    return records


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[RoundRecord]:
    return record_rounds(monkeypatch)


@pytest.fixture
def draft_of(tiny_model: Path) -> DraftOf:
    return lambda name: replace(DRAFTS[name], model=str(tiny_model) if DRAFTS[name].model else "")


@pytest.fixture(scope="module")
def ragged(requests: list[Request]) -> list[Request]:
    """More requests than slots, which end at different times; every second one is seeded."""
    seeded = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
    limits = (19, 4, 11, 2, 16)
    samplings = [
        replace(seeded, max_tokens=n, seed=n) if i % 2 else Sampling(n)
        for i, n in enumerate(limits)
    ]
    return [replace(r, sampling=s) for r, s in zip(requests[:5], samplings, strict=True)]


@pytest.fixture(scope="module")
def dense(engine: Engine, ragged: list[Request]) -> Tokens:
    return tokens_by_id(engine.run(ragged, None))


# ---------------------------------------------------------------------------------------- the table


@given(schedules(), st.integers(1, 9), st.floats(0, 1))
def test_gamma_is_looked_up_by_rows_and_acceptance(
    schedule: GammaSchedule, rows: int, acceptance: float
) -> None:
    classes = schedule.gammas[min(rows, len(schedule.gammas)) - 1]
    possible = set()
    for number, gamma in enumerate(classes):
        low = number / len(classes) - 1e-9
        high = (number + 1) / len(classes) + 1e-9
        if low <= acceptance <= high:
            possible.add(gamma)
    gamma = schedule.gamma(rows, acceptance)
    assert gamma in possible
    assert schedule.min_gamma <= gamma <= schedule.max_gamma


@given(
    st.lists(st.builds(FirstTokens, st.integers(0, 9), st.integers(0, 3)), max_size=RECENT_ROUNDS),
    st.floats(0, 1),
)
def test_acceptance_is_the_expected_one_until_enough_rounds_have_drafted(
    recent: list[FirstTokens], expected: float
) -> None:
    acceptance = GammaSchedule(((1,),), expected).acceptance(recent)
    if sum(a + r > 0 for a, r in recent) < MIN_DRAFTED_ROUNDS:
        assert acceptance == expected
    else:
        accepted = sum(a for a, _ in recent)
        rejected = sum(r for _, r in recent)
        assert acceptance == pytest.approx((accepted + expected) / (accepted + rejected + 1))


@pytest.mark.parametrize("gammas", [(), ((),), ((1,), ()), ((3, -1),)])
def test_a_table_with_gaps_or_negative_gammas_is_refused(
    gammas: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="γ of 0 or more"):
        GammaSchedule(gammas, 0.5)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_equal_the_dense_loops_under_any_schedule(
    engine: Engine, ragged: list[Request], dense: Tokens, draft_of: DraftOf, name: str
) -> None:
    @settings(deadline=None, max_examples=4, database=None)
    @given(schedules(), st.randoms(use_true_random=False))
    def check(schedule: GammaSchedule, rng: random.Random) -> None:
        shuffled = rng.sample(ragged, len(ragged))
        results = list(engine.run([schedule, *shuffled], draft_of(name)))
        assert tokens_by_id(results) == dense
        min_gamma = max(schedule.min_gamma, int(name == "draft_model"))
        max_gamma = max(1, schedule.max_gamma)
        assert all(min_gamma * r.rounds <= r.drafted <= max_gamma * r.rounds for r in results)
        assert all(r.accepted <= r.proposed <= r.drafted for r in results)

    check()


@pytest.mark.parametrize(
    "draft", [Draft("std", keep=1.0), Draft("full", depth=0.95), Draft("std", keep=1.0, model="x")]
)
def test_a_draft_that_keeps_everything_is_always_accepted_under_any_schedule(
    engine: Engine, requests: list[Request], tiny_model: Path, draft: Draft
) -> None:
    """Dense rounds and rounds of any γ leave complete draft caches."""
    draft = replace(draft, gamma=MAX_GAMMA, model=str(tiny_model) if draft.model else "")
    limited = with_limits(requests, (14, 12, 10, 8, 6))
    proposed = []

    @settings(deadline=None, max_examples=5, database=None)
    @given(st.lists(schedules(), min_size=5, max_size=5))
    def check(each: list[GammaSchedule]) -> None:
        stream = chain.from_iterable(zip(each, limited, strict=True))
        results = list(engine.run(stream, draft))
        assert [r.accepted for r in results] == [r.proposed for r in results]
        assert not any(sum(r.reject_counts) for r in results)
        proposed.append(sum(r.proposed for r in results))

    check()
    assert sum(proposed) > 20


def test_strict_tokens_in_bfloat16_equal_the_dense_loops_under_any_schedule(
    tiny_model: Path, ragged: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's operations, whose sums depend on the shapes of their inputs."""
    monkeypatch.setattr(loader, "supports", lambda name, of: False)
    engine = Engine.load(str(tiny_model), dtype="bfloat16", max_num_seqs=3, strict=MAX_GAMMA + 1)
    expected = tokens_by_id(engine.run(ragged, None))

    @settings(deadline=None, max_examples=3, database=None)
    @given(schedules(), st.sampled_from(["selected", "target", "ngram", "refresh"]))
    def check(schedule: GammaSchedule, name: str) -> None:
        results = engine.run([schedule, *reversed(ragged)], DRAFTS[name])
        assert tokens_by_id(results) == expected

    check()


@pytest.mark.parametrize("name", DRAFTS)
def test_unseeded_rows_and_dense_rounds_mix(
    engine: Engine, ragged: list[Request], dense: Tokens, draft_of: DraftOf, name: str
) -> None:
    unseeded = [replace(r, sampling=Sampling(9, temperature=1.0)) for r in ragged[1:3]]
    schedule = GammaSchedule(((4, 0, 2), (0,), (3, 1)), 0.5)
    stream = [schedule, ragged[0], *unseeded, *ragged[3:]]
    tokens = tokens_by_id(engine.run(stream, draft_of(name)))
    assert all(len(tokens[r.request_id]) == r.sampling.max_tokens for r in unseeded)
    for request in (ragged[0], *ragged[3:]):
        assert tokens[request.request_id] == dense[request.request_id]


# --------------------------------------------------------------------------------- γ of each round


def test_gamma_follows_the_number_of_running_rows(
    engine: Engine, requests: list[Request], rounds: list[RoundRecord]
) -> None:
    by_rows = {1: 5, 2: 0, 3: 2}
    schedule = GammaSchedule(tuple((gamma,) for gamma in by_rows.values()), 0.5)
    limited = with_limits(requests, (30, 16, 6, 6))
    results = list(engine.run([schedule, *limited], Draft("full", gamma=5)))
    assert {r.running for r in rounds} == {1, 2, 3}
    assert all(r.gamma == by_rows[r.running] for r in rounds)
    assert sum(r.drafted for r in results) == sum(r.running * r.gamma for r in rounds)


@settings(deadline=None, max_examples=3, database=None)
@given(data=st.data())
def test_gamma_follows_from_rows_and_recent_rounds_and_is_reproducible(
    engine: Engine, requests: list[Request], data: st.DataObject
) -> None:
    schedule = data.draw(schedules())
    draft = Draft("random", k=1, gamma=MAX_GAMMA, seed=data.draw(st.integers(0, 3)))
    stream = [schedule, *with_limits(requests, (30, 8, 3, 16))]
    with pytest.MonkeyPatch.context() as patch:
        records = record_rounds(patch)
        first = list(engine.run(stream, draft))
        first_rounds = list(records)
        records.clear()
        second = list(engine.run(stream, draft))
    assert first_rounds == records
    reproducible = (
        "request_id",
        "token_ids",
        "rounds",
        "drafted",
        "proposed",
        "accepted",
        "accept_counts",
        "reject_counts",
    )
    for one, other in zip(first, second, strict=True):
        for name in reproducible:
            assert getattr(one, name) == getattr(other, name), name
    for number, record in enumerate(first_rounds):
        recent = [r.first_tokens for r in first_rounds[:number]][-RECENT_ROUNDS:]
        assert record.gamma == schedule.gamma(record.running, schedule.acceptance(recent))
    accepted = sum(r.first_tokens.accepted for r in first_rounds)
    rejected = sum(r.first_tokens.rejected for r in first_rounds)
    assert sum(r.reject_counts[0] for r in first) == rejected
    assert sum(sum(r.accept_counts[1:]) for r in first) == accepted


def test_drafting_is_tried_again_after_dense_rounds(
    engine: Engine,
    requests: list[Request],
    rounds: list[RoundRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few rounds at a time while drafts are rejected; always once they are accepted."""
    accepts = False
    monkeypatch.setattr(
        "std_core.decoding.round.accept_equal",
        lambda drafted, target: accept_equal(drafted, target) * int(accepts),
    )
    schedule = GammaSchedule(((0, 4),), 0.9)  # drafts if more than half is accepted
    (request,) = with_limits(requests, (100,))
    list(engine.run([schedule, request], Draft("full", gamma=4)))
    cycle = [4] * MIN_DRAFTED_ROUNDS + [0] * (RECENT_ROUNDS - MIN_DRAFTED_ROUNDS + 1)
    gammas = [r.gamma for r in rounds]
    assert len(gammas) == 99
    assert gammas[: 2 * len(cycle)] == 2 * cycle
    rounds.clear()
    accepts = True
    list(engine.run([schedule, request], Draft("full", gamma=4)))
    assert Counter(r.gamma for r in rounds) == {4: -(-99 // 5)}


def test_a_schedule_is_in_force_until_the_next_one(
    engine: Engine, requests: list[Request], rounds: list[RoundRecord]
) -> None:
    limited = with_limits(requests, (8,) * 4)
    one, three = (GammaSchedule(((gamma,),), 0.5) for gamma in (1, 3))
    single_slot = replace(engine, max_num_seqs=1, prefixes=None)
    stream = [limited[0], one, limited[1], one, three, limited[2], limited[3]]
    list(single_slot.run(stream, Draft("std", gamma=5)))
    gammas = [r.gamma for r in rounds]
    assert gammas == sorted(gammas, key=(5, 1, 3).index)
    assert set(gammas) == {5, 1, 3}


def test_a_schedule_beyond_the_drafts_gamma_is_refused(
    engine: Engine, requests: list[Request]
) -> None:
    for draft in (Draft("std", gamma=3), None):
        with pytest.raises(ValueError, match="up to 4 tokens a round"):
            next(engine.run([GammaSchedule(((0, 4),), 0.5), requests[0]], draft))


def test_unverified_decoding_ignores_schedules(engine: Engine, requests: list[Request]) -> None:
    draft = Draft("random", k=1, gamma=3)
    dense_only = GammaSchedule(((0,),), 0.5)
    plain = engine.run(requests[:2], draft, mode="sparse")
    scheduled = engine.run([dense_only, *requests[:2]], draft, mode="sparse")
    assert tokens_by_id(plain) == tokens_by_id(scheduled)
