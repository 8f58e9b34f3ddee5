from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.plan.capacity import USABLE_MEMORY, Capacity
from pipeline.plan.choose import EXPLORATION_INTERVAL, DraftPlanner
from pipeline.plan.history import History
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.plan.waves import (
    MAX_REQUESTS_PER_SLOT,
    MIN_REQUESTS_PER_SLOT,
    SIMILAR_RATIO,
    plan,
    split_into_waves,
)
from pipeline.records import PlannedRequest, UsageError, Wave
from std_core.cost_model.memory import LongestRequest, memory_breakdown, peak_memory
from std_core.cost_model.profile import (
    Profile,
)
from std_core.types import Draft
from tests.pipeline.plan.stub_plan import (
    A100,
    LLAMA,
    PROFILE,
    STD,
    planned_request,
)


def ids(requests: tuple[PlannedRequest, ...]) -> Counter[str]:
    return Counter(r.request_id for r in requests)


def waves_of(
    pool: Sequence[PlannedRequest],
    idle_engines: int,
    config: WaveConfig,
    profile: Profile = PROFILE,
    history: History | None = None,
) -> tuple[Wave, ...]:
    """The plan once all requests are known."""
    return plan(
        pool,
        profile,
        history or History(),
        idle_engines=idle_engines,
        closed=True,
        config=config,
    )


pools = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), max_size=400).map(
    lambda pairs: tuple(
        planned_request(i, video, context) for i, (video, context) in enumerate(pairs)
    )
)


# --- which requests are in a wave -----------------------------------------------------------------


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_every_request_is_in_one_wave(pool: tuple[PlannedRequest, ...], slots: int) -> None:
    waves = list(split_into_waves(pool, lambda _: slots))
    assert Counter(r.request_id for wave in waves for r in wave) == ids(pool)
    assert all(waves)


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_questions_on_a_video_are_adjacent_in_one_wave(
    pool: tuple[PlannedRequest, ...], slots: int
) -> None:
    in_order = [
        (w, r.info.uri)
        for w, wave in enumerate(split_into_waves(pool, lambda _: slots))
        for r in wave
    ]
    runs = [pair for i, pair in enumerate(in_order) if i == 0 or in_order[i - 1] != pair]
    assert len(runs) == len({r.info.uri for r in pool})


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_waves_end_when_they_are_full_or_contexts_become_shorter(
    pool: tuple[PlannedRequest, ...], slots: int
) -> None:
    for wave, following in pairwise(split_into_waves(pool, lambda _: slots)):
        assert len(wave) <= MAX_REQUESTS_PER_SLOT * slots or len({r.info.uri for r in wave}) == 1
        first = [r for r in following if r.info.uri == following[0].info.uri]
        assert (
            len(wave) >= MIN_REQUESTS_PER_SLOT * slots
            or len(wave) + len(first) > MAX_REQUESTS_PER_SLOT * slots
        )
        assert max(r.context for r in wave) >= max(r.context for r in following)


def test_longest_first_and_split_where_contexts_change() -> None:
    pool = tuple(
        planned_request(i, i, 100 if i % 2 else 4000) for i in range(2 * MIN_REQUESTS_PER_SLOT)
    )
    assert [{r.context for r in w} for w in split_into_waves(pool, lambda _: 1)] == [{4000}, {100}]
    (few,) = split_into_waves(pool[:4], lambda _: 1)
    assert [r.context for r in few] == [4000, 4000, 100, 100]


@settings(deadline=None)
@given(pools, st.integers(1, 4))
def test_while_requests_may_come_only_half_full_waves_of_similar_contexts_are_made(
    pool: tuple[PlannedRequest, ...], slots: int
) -> None:
    waves = list(split_into_waves(pool, lambda _: slots, closed=False))
    for wave in waves:
        groups = {
            uri: max(r.context for r in wave if r.info.uri == uri)
            for uri in {r.info.uri for r in wave}
        }
        assert len(wave) >= MIN_REQUESTS_PER_SLOT * slots and max(
            groups.values()
        ) <= SIMILAR_RATIO * min(groups.values())
    out = {r.request_id for wave in waves for r in wave}
    left = tuple(r for r in pool if r.request_id not in out)
    assert Counter(
        r.request_id for w in split_into_waves(left, lambda _: slots) for r in w
    ) + Counter(out) == ids(pool)


# --- a sequence of calls --------------------------------------------------------------------------


calls = st.lists(st.tuples(pools, st.integers(0, 3)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(calls, st.integers(1, 8), st.integers(1, 3))
def test_over_any_sequence_of_calls_every_request_is_in_one_wave(
    arriving: list[tuple[tuple[PlannedRequest, ...], int]], slots: int, engines: int
) -> None:
    config = WaveConfig(slots, engines=engines)
    pool: list[PlannedRequest] = []
    seen: Counter[str] = Counter()
    history = History()
    whole = 0
    for part, (new, idle) in enumerate([*arriving, *[((), 10)] * 999]):
        pool += [replace(r, request_id=f"{part}/{r.request_id}") for r in new]
        whole += len(new)
        closed = part >= len(arriving)
        state: dict[str, Any] = {
            "history": history,
            "idle_engines": idle,
            "closed": closed,
            "config": config,
        }
        waves = plan(pool, PROFILE, **state)
        assert len(waves) <= idle
        assert waves == plan(tuple(pool), PROFILE, **state)
        history = history.with_issued(len(waves))
        out = {r.request_id for wave in waves for r in wave.requests}
        seen.update(r.request_id for wave in waves for r in wave.requests)
        pool = [r for r in pool if r.request_id not in out]
        if closed and not pool:
            break
    assert len(seen) == whole and set(seen.values()) <= {1}


def test_engines_share_the_last_requests() -> None:
    pool = tuple(planned_request(i, i, 1000) for i in range(40))
    waves = waves_of(pool, 4, WaveConfig(4, engines=4))
    assert [len(w.requests) for w in waves] == [10, 10, 10, 10]


def test_fifty_thousand_are_planned_in_seconds() -> None:
    pool = tuple(planned_request(i, i // 2, 500 + i * 7919 % 60_000) for i in range(50_000))
    began = time.process_time()
    waves = waves_of(pool, len(pool), WaveConfig())
    assert sum(len(w.requests) for w in waves) == len(pool)
    assert time.process_time() - began < 10  # 1.1 s on an idle core


# --- what fits the device -------------------------------------------------------------------------


mixed = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20_000), st.floats(0, 1)), max_size=100
).map(
    lambda found: tuple(
        planned_request(i, video, n, int(n * share)) for i, (video, n, share) in enumerate(found)
    )
)


@settings(deadline=None, max_examples=30)
@given(
    mixed,
    st.floats(16.2e9, 30e9),
    st.sampled_from(["auto", None, Draft("std"), Draft("std", weights="int8")]),
)
def test_memory_is_never_exceeded(
    pool: tuple[PlannedRequest, ...], memory: float, draft: Draft | None
) -> None:
    profile = replace(PROFILE, device=replace(A100, memory=memory))
    config = WaveConfig(64, draft=draft)
    assume(any(Capacity(profile, config).misfit(r) is None for r in pool))
    waves = waves_of(pool, 1000, config, profile)
    for wave in waves:
        assert wave.max_num_seqs >= 1 and wave.options[0].slots == wave.max_num_seqs
        visual, text = (
            max(n)
            for n in zip(
                *((r.frame_plan.tokens, r.context - r.frame_plan.tokens) for r in wave.requests),
                strict=True,
            )
        )
        used = wave.engine_config.draft  # with the largest γ that any round has
        needed = memory_breakdown(
            LLAMA,
            LongestRequest(visual + text, visual, config.max_tokens, sampling="greedy"),
            wave.max_num_seqs,
            used,
        )
        assert peak_memory(needed) <= USABLE_MEMORY * memory
    out = {r.request_id for wave in waves for r in wave.requests}
    assert all((r.request_id in out) == (Capacity(profile, config).misfit(r) is None) for r in pool)


def test_slots_are_as_many_as_fit() -> None:
    pool = tuple(planned_request(i, i, 100_000) for i in range(100))
    (wave, *_) = waves_of(pool, 1, WaveConfig(32, draft=None))
    row = dict(wave.options[0].memory)["kv"] / wave.max_num_seqs
    needed = peak_memory(dict(wave.options[0].memory))
    assert 1 < wave.max_num_seqs < 32 and needed <= USABLE_MEMORY * 80e9 < needed + 1.1 * row


def test_a_gamma_schedule_fits_the_memory_of_its_slots() -> None:
    """More drafted tokens take more memory; there are never fewer slots for it."""
    config = WaveConfig(64)
    load = LongestRequest(20_100, 20_000, 256, sampling="greedy")
    pool = [planned_request(i, i, load.context, load.visual) for i in range(64)]

    def planned(memory: float) -> Wave:
        profile = replace(PROFILE, device=replace(A100, memory=memory), drafts=(STD,))
        return waves_of(pool, 1, config, profile)[0]

    wide = planned(60e9)
    assert (
        wide.draft is not None
        and wide.gamma_schedule is not None
        and wide.draft.gamma < wide.gamma_schedule.max_gamma
    )
    assert wide.engine_config.draft == replace(wide.draft, gamma=wide.gamma_schedule.max_gamma)
    assert dict(wide.options[0].memory) == memory_breakdown(
        LLAMA, load, wide.max_num_seqs, wide.engine_config.draft
    )
    needed = peak_memory(memory_breakdown(LLAMA, load, wide.max_num_seqs, wide.draft))
    tight = planned((needed + 1) / USABLE_MEMORY)
    assert (tight.max_num_seqs, tight.draft) == (wide.max_num_seqs, wide.draft)
    assert tight.gamma_schedule is not None and tight.gamma_schedule.max_gamma == wide.draft.gamma


def test_if_nothing_fits_the_error_names_the_remedy() -> None:
    small = replace(PROFILE, device=replace(A100, name="toy", memory=8e9))
    with pytest.raises(UsageError, match=r"toy can give 7\.2.*smaller model"):
        waves_of((planned_request(0, 0, 100),), 1, WaveConfig(), small)
    long = planned_request(0, 0, 900_000)
    with pytest.raises(UsageError, match="lower fps"):
        waves_of((long,), 1, WaveConfig())
    error = Capacity(PROFILE, WaveConfig()).misfit(long)
    assert error is not None and error.code == "out_of_memory"
    (wave,) = waves_of((long, planned_request(1, 1, 100)), 9, WaveConfig())
    assert [r.request_id for r in wave.requests] == ["1"]


# --- which draft ----------------------------------------------------------------------------------


def test_a_given_draft_is_always_used_and_none_decodes_densely() -> None:
    pool = (planned_request(0, 0, 100),)
    named = waves_of(pool, 1, WaveConfig(draft=Draft("random", gamma=7)))[0]
    assert named.draft == Draft("random", gamma=7) and named.options[0].speedup < 1
    assert waves_of(pool, 1, WaveConfig(draft=None))[0].draft is None


def test_a_given_draft_keeps_its_gamma() -> None:
    pool = (planned_request(0, 0, 60_000),)
    for draft in (Draft("std", gamma=7), None):
        (wave,) = waves_of(pool, 1, WaveConfig(draft=draft))
        assert wave.gamma_schedule is None and wave.engine_config.draft == draft
    (default,) = waves_of(pool, 1, WaveConfig(), replace(PROFILE, drafts=()))
    assert default.gamma_schedule is None


def test_without_a_calibrated_draft_waves_decode_densely() -> None:
    bare = replace(PROFILE, drafts=())
    (wave,) = waves_of((planned_request(0, 0, 100),), 1, WaveConfig(), bare)
    assert wave.draft is None


def test_waves_are_numbered_over_the_run_so_that_one_in_fifty_explores() -> None:
    config = WaveConfig()
    pool = tuple(planned_request(i, i, 60_000) for i in range(8))
    index = EXPLORATION_INTERVAL - 1
    (wave,) = waves_of(pool, 1, config, history=History().with_issued(index))
    planner = DraftPlanner(PROFILE, History(), config)
    explored = planner.options(WaveSummary.of(pool, config), index)[0].draft
    assert wave.draft == explored != waves_of(pool, 1, config)[0].draft


def test_engine_configs_of_one_draft_are_equal_whatever_their_gamma_schedule() -> None:
    """So the next wave may start while the last rows of the one before still decode."""
    pool = tuple(planned_request(i, i, 60_000 - 400 * i) for i in range(60))
    waves = waves_of(pool, 9, WaveConfig(2))
    assert len(waves) > 1 and len({wave.gamma_schedule for wave in waves}) > 1
    assert len({wave.engine_config for wave in waves}) == 1
