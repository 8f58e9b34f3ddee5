"""Rounds whose γ follows the number of rows and what was accepted lately."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.decoding.accept import accept_equal
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

WIDEST = 6
DRAFTS = {
    "target": Draft("full", depth=0.4, gamma=WIDEST),
    "selected": Draft("std", keep=0.2, gamma=WIDEST),
    "refresh": Draft("snapkv", keep=0.2, refresh=2, gamma=WIDEST),
    "draft_model": Draft("std", keep=0.3, gamma=WIDEST, model="second"),
    "ngram": Draft("ngram", gamma=WIDEST),
}
Texts = dict[str, list[int]]
# of each its rows, its γ, and the (accepted, refused) that its verification gave them
Rounds = list[tuple[int, int, FirstTokens]]


def schedules(max_gamma: int = WIDEST) -> st.SearchStrategy[GammaSchedule]:
    """Any at all, for the fixture's three slots."""
    classes = st.lists(st.integers(0, max_gamma), min_size=1, max_size=5).map(tuple)
    return st.builds(
        GammaSchedule, st.lists(classes, min_size=1, max_size=3).map(tuple), st.floats(0, 1)
    )


@pytest.fixture
def draft_of(tiny_model: Path) -> Callable[[str], Draft]:
    return lambda name: replace(DRAFTS[name], model=str(tiny_model) if DRAFTS[name].model else "")


@pytest.fixture(scope="module")
def ragged(requests: list[Request]) -> list[Request]:
    """More than slots, which end at different times; every second text is drawn, with a seed."""
    drawn = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
    limits = (19, 4, 11, 2, 16)
    samplings = [
        replace(drawn, max_tokens=n, seed=n) if i % 2 else Sampling(n) for i, n in enumerate(limits)
    ]
    return [replace(r, sampling=s) for r, s in zip(requests[:5], samplings, strict=True)]


@pytest.fixture(scope="module")
def dense(engine: Engine, ragged: list[Request]) -> Texts:
    return texts(engine.run(ragged, None))


def texts(results: Iterator[Result]) -> Texts:
    return {r.request_id: r.token_ids for r in results}


def watched(patch: pytest.MonkeyPatch) -> Rounds:
    """Filled with all rounds from here on."""
    seen: Rounds = []
    decoded = Batch._decode

    def noted(batch: Batch, gamma: int) -> object:
        done = decoded(batch, gamma)
        rows = [slot for slot, row in enumerate(batch.rows) if row is not None]
        firsts = [
            (int(done.accepted[slot] > 0), int(done.accepted[slot] == 0 < done.proposed[slot]))
            for slot in rows
        ]
        counts = FirstTokens(sum(a for a, _ in firsts), sum(b for _, b in firsts))
        seen.append((len(rows), gamma, counts))
        return done

    patch.setattr(Batch, "_decode", noted)
    return seen


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return watched(monkeypatch)


# --------------------------------------------------------------------------------------- the record


@given(schedules(), st.integers(1, 9), st.floats(0, 1))
def test_a_gamma_schedule_looks_up_rows_and_acceptance(
    schedule: GammaSchedule, rows: int, acceptance: float
) -> None:
    classes = schedule.gammas[min(rows, len(schedule.gammas)) - 1]
    bounds = [(i / len(classes), (i + 1) / len(classes)) for i in range(len(classes))]
    near = {
        g
        for g, (low, high) in zip(classes, bounds, strict=True)
        if low - 1e-9 <= acceptance <= high + 1e-9
    }
    assert schedule.gamma(rows, acceptance) in near
    assert schedule.min_gamma <= schedule.gamma(rows, acceptance) <= schedule.max_gamma


@given(
    st.lists(st.builds(FirstTokens, st.integers(0, 9), st.integers(0, 3)), max_size=RECENT_ROUNDS),
    st.floats(0, 1),
)
def test_acceptance_is_the_expected_one_until_three_rounds_have_drafted(
    seen: list[FirstTokens], expected: float
) -> None:
    found = GammaSchedule(((1,),), expected).acceptance(seen)
    if sum(a + r > 0 for a, r in seen) < MIN_DRAFTED_ROUNDS:
        assert found == expected
    else:
        accepted = sum(a for a, _ in seen)
        refused = sum(r for _, r in seen)
        assert found == pytest.approx((accepted + expected) / (accepted + refused + 1))


@pytest.mark.parametrize("gammas", [(), ((),), ((1,), ()), ((3, -1),)])
def test_a_table_with_holes_is_no_gamma_schedule(gammas: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="γ of 0 or more"):
        GammaSchedule(gammas, 0.5)


# ------------------------------------------------------------------------------- texts don't change


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_are_the_dense_loops_at_any_gamma_schedule(
    engine: Engine, ragged: list[Request], dense: Texts, draft_of: Callable[[str], Draft], name: str
) -> None:
    @settings(deadline=None, max_examples=4, database=None)
    @given(schedules(), st.randoms(use_true_random=False))
    def check(schedule: GammaSchedule, rng: random.Random) -> None:
        asked = rng.sample(ragged, len(ragged))
        results = list(engine.run([schedule, *asked], draft_of(name)))
        assert texts(iter(results)) == dense
        min_gamma = max(schedule.min_gamma, int(name == "draft_model"))
        assert all(
            min_gamma * r.rounds <= r.drafted <= max(1, schedule.max_gamma) * r.rounds
            for r in results
        )
        assert all(r.accepted <= r.proposed <= r.drafted for r in results)

    check()


@pytest.mark.parametrize(
    "draft", [Draft("std", keep=1.0), Draft("full", depth=0.95), Draft("std", keep=1.0, model="x")]
)
def test_a_draft_that_keeps_everything_is_always_accepted_at_any_gamma_schedule(
    engine: Engine, requests: list[Request], tiny_model: Path, draft: Draft
) -> None:
    """Dense rounds and rounds of any γ leave behind them what drafts go on from."""
    draft = replace(draft, gamma=WIDEST, model=str(tiny_model) if draft.model else "")
    asked = [replace(r, sampling=Sampling(14 - 2 * i)) for i, r in enumerate(requests[:5])]
    proposed = []

    @settings(deadline=None, max_examples=5, database=None)
    @given(st.lists(schedules(), min_size=5, max_size=5))
    def check(each: list[GammaSchedule]) -> None:
        results = list(engine.run(chain.from_iterable(zip(each, asked, strict=True)), draft))
        assert [r.accepted for r in results] == [r.proposed for r in results]
        assert not any(sum(r.reject_counts) for r in results)
        proposed.append(sum(r.proposed for r in results))

    check()
    assert sum(proposed) > 20


def test_strict_texts_are_the_dense_loops_in_bfloat16_at_any_gamma_schedule(
    tiny_model: Path, ragged: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PyTorch's operations, whose sums depend on the shapes they are made in."""
    monkeypatch.setattr(loader, "supports", lambda name, of: False)
    engine = Engine.load(str(tiny_model), dtype="bfloat16", max_num_seqs=3, strict=WIDEST + 1)
    expected = texts(engine.run(ragged, None))

    @settings(deadline=None, max_examples=3, database=None)
    @given(schedules(), st.sampled_from(["selected", "target", "ngram", "refresh"]))
    def check(schedule: GammaSchedule, name: str) -> None:
        assert texts(engine.run([schedule, *reversed(ragged)], DRAFTS[name])) == expected

    check()


@pytest.mark.parametrize("name", DRAFTS)
def test_draws_without_a_seed_go_on_through_dense_rounds(
    engine: Engine, ragged: list[Request], dense: Texts, draft_of: Callable[[str], Draft], name: str
) -> None:
    fresh = [
        replace(r, sampling=Sampling(9, temperature=1.0)) if i in (1, 2) else r
        for i, r in enumerate(ragged)
    ]
    found = texts(
        engine.run([GammaSchedule(((4, 0, 2), (0,), (3, 1)), 0.5), *fresh], draft_of(name))
    )
    assert all(len(found[r.request_id]) == r.sampling.max_tokens for r in fresh)
    assert all(
        found[r.request_id] == dense[r.request_id] for i, r in enumerate(ragged) if i not in (1, 2)
    )


# -------------------------------------------------------------------------------- which γ, and when


def test_gamma_follows_the_rows_that_are_left(
    engine: Engine, requests: list[Request], rounds: Rounds
) -> None:
    of_rows = {1: 5, 2: 0, 3: 2}
    asked = [
        replace(r, sampling=Sampling(n)) for r, n in zip(requests, (30, 16, 6, 6), strict=False)
    ]
    results = list(
        engine.run(
            [GammaSchedule(tuple((g,) for g in of_rows.values()), 0.5), *asked],
            Draft("full", gamma=5),
        )
    )
    assert {rows for rows, _, _ in rounds} == {1, 2, 3}
    assert all(gamma == of_rows[rows] for rows, gamma, _ in rounds)
    assert sum(r.drafted for r in results) == sum(rows * gamma for rows, gamma, _ in rounds)


@settings(deadline=None, max_examples=3, database=None)
@given(data=st.data())
def test_every_round_has_the_gamma_of_its_rows_and_of_what_was_seen(
    engine: Engine, requests: list[Request], data: st.DataObject
) -> None:
    """By the table, read again from what each round had given; and twice the same."""
    schedule = data.draw(schedules())
    draft = Draft("random", k=1, gamma=WIDEST, seed=data.draw(st.integers(0, 3)))
    asked = [
        replace(r, sampling=Sampling(n)) for r, n in zip(requests, (30, 8, 3, 16), strict=False)
    ]
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        first = list(engine.run([schedule, *asked], draft))
        once = list(seen)
        seen.clear()
        again = list(engine.run([schedule, *asked], draft))
    assert once == seen
    same = (
        "request_id",
        "token_ids",
        "rounds",
        "drafted",
        "proposed",
        "accepted",
        "accept_counts",
        "reject_counts",
    )
    assert [[getattr(r, n) for n in same] for r in first] == [
        [getattr(r, n) for n in same] for r in again
    ]
    for number, (rows, gamma, _) in enumerate(once):
        lately = [count_accepted_rejected for _, _, count_accepted_rejected in once[:number]][
            -RECENT_ROUNDS:
        ]
        assert gamma == schedule.gamma(rows, schedule.acceptance(lately))
    assert sum(r.reject_counts[0] for r in first) == sum(refused for _, _, (_, refused) in once)
    assert sum(sum(r.accept_counts[1:]) for r in first) == sum(
        accepted for _, _, (accepted, _) in once
    )


def test_a_gate_that_closes_opens_again_for_a_few_rounds(
    engine: Engine,
    requests: list[Request],
    rounds: Rounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While what is drafted is refused, and until it is accepted."""
    good = False
    monkeypatch.setattr(
        "std_core.decoding.round.accept_equal", lambda d, t: accept_equal(d, t) * int(good)
    )
    schedule = GammaSchedule(((0, 4),), 0.9)  # drafts where more than half is accepted
    asked = replace(requests[0], sampling=Sampling(100))
    list(engine.run([schedule, asked], Draft("full", gamma=4)))
    cycle = [4] * MIN_DRAFTED_ROUNDS + [0] * (RECENT_ROUNDS - MIN_DRAFTED_ROUNDS + 1)
    gammas = [gamma for _, gamma, _ in rounds]
    assert len(gammas) == 99 and gammas[: 2 * len(cycle)] == 2 * cycle
    rounds.clear()
    good = True
    list(engine.run([schedule, asked], Draft("full", gamma=4)))
    assert Counter(gamma for _, gamma, _ in rounds) == {4: -(-99 // 5)}


def test_a_gamma_schedule_on_the_way_holds_from_there_on(
    engine: Engine, requests: list[Request], rounds: Rounds
) -> None:
    asked = [replace(r, sampling=Sampling(8)) for r in requests[:4]]
    fixed = [GammaSchedule(((gamma,),), 0.5) for gamma in (1, 3)]
    alone = replace(engine, max_num_seqs=1, prefixes=None)
    list(
        alone.run(
            [asked[0], fixed[0], asked[1], fixed[0], fixed[1], asked[2], asked[3]],
            Draft("std", gamma=5),
        )
    )
    gammas = [gamma for _, gamma, _ in rounds]
    assert gammas == sorted(gammas, key=(5, 1, 3).index) and set(gammas) == {5, 1, 3}


def test_a_gamma_schedule_beyond_the_drafts_gamma_is_refused(
    engine: Engine, requests: list[Request]
) -> None:
    for draft in (Draft("std", gamma=3), None):
        with pytest.raises(ValueError, match="up to 4 tokens a round"):
            next(engine.run([GammaSchedule(((0, 4),), 0.5), requests[0]], draft))


def test_unverified_decoding_has_no_gamma_schedule(engine: Engine, requests: list[Request]) -> None:
    asked = requests[:2]
    draft = Draft("random", k=1, gamma=3)
    plain, scheduled = (
        list(engine.run([*schedule, *asked], draft, mode="sparse"))
        for schedule in ([], [GammaSchedule(((0,),), 0.5)])
    )
    assert texts(iter(plain)) == texts(iter(scheduled))
