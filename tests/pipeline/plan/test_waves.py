from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.plan.choose import GAIN, GAMMAS, LEVELS, MEMORY, Steps, choose
from pipeline.plan.history import EVERY
from pipeline.plan.settings import WaveSummary
from pipeline.plan.waves import HALF, LIKE, WAVE, History, WaveConfig, cut, misfit, plan
from pipeline.records import (
    DraftOption,
    FramePlan,
    InputRow,
    PlannedRequest,
    UsageError,
    VideoInfo,
    Wave,
)
from std_core.cost_model.acceptance import AcceptanceCounts, AcceptanceCurve
from std_core.cost_model.crossover import crossover_context
from std_core.cost_model.memory import LongestRequest, memory_breakdown, peak_memory
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PrefillLatency,
    Profile,
    UnionFraction,
)
from std_core.types import Draft

LLAMA = ModelSize(
    32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    parameters=8_030_000_000,
)
A100 = Device("A100", kind="cuda", bandwidth=2e12, memory=80e9, flops=312e12)
FLAT = LatencyModel(1.0, 1e-3)
GOOD = (AcceptanceCounts(4096, "caption", (90,), (10,)),)
STD = CalibratedDraft(Draft("std"), FLAT, DraftSetupLatency(), GOOD)
INT4 = CalibratedDraft(Draft("std", weights="int4"), FLAT, DraftSetupLatency(), GOOD)
BAD = CalibratedDraft(
    Draft("random"), FLAT, DraftSetupLatency(), (AcceptanceCounts(4096, "caption", (1,), (99,)),)
)
PROFILE = Profile(
    A100,
    model="m",
    dtype="bfloat16",
    model_size=LLAMA,
    latency=FLAT,
    prefill=PrefillLatency(0.0, 1e-4, 0.0),
    vision_s_per_token=1e-5,
    drafts=(STD, INT4, BAD),
)


def request(number: int, video: int, context: int, visual: int | None = None) -> PlannedRequest:
    uri = f"v{video}.mp4"
    info = VideoInfo(
        uri,
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
    tokens = context if visual is None else visual
    return PlannedRequest(
        str(number),
        input_row=InputRow(uri, "Describe."),
        info=info,
        frame_plan=FramePlan((0.0,), height=56, width=56, fps=1.0, tokens=tokens),
        context=context,
    )


def ids(requests: tuple[PlannedRequest, ...]) -> Counter[str]:
    return Counter(r.request_id for r in requests)


def mix(contexts: list[int], setting: WaveConfig) -> WaveSummary:
    return WaveSummary.of([request(i, i, context) for i, context in enumerate(contexts)], setting)


pools = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), max_size=400).map(
    lambda pairs: tuple(request(i, video, context) for i, (video, context) in enumerate(pairs))
)


# ------------------------------------------------------------------------------- what goes together


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_every_request_is_in_one_wave(pool: tuple[PlannedRequest, ...], slots: int) -> None:
    waves = list(cut(pool, lambda _: slots))
    assert Counter(r.request_id for wave in waves for r in wave) == ids(pool)
    assert all(waves)


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_questions_on_a_video_lie_side_by_side_in_one_wave(
    pool: tuple[PlannedRequest, ...], slots: int
) -> None:
    in_order = [(w, r.info.uri) for w, wave in enumerate(cut(pool, lambda _: slots)) for r in wave]
    runs = [pair for i, pair in enumerate(in_order) if i == 0 or in_order[i - 1] != pair]
    assert len(runs) == len({r.info.uri for r in pool})


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_waves_are_full_and_alike(pool: tuple[PlannedRequest, ...], slots: int) -> None:
    for wave, following in pairwise(cut(pool, lambda _: slots)):
        assert len(wave) <= WAVE * slots or len({r.info.uri for r in wave}) == 1
        first = [r for r in following if r.info.uri == following[0].info.uri]
        assert len(wave) >= HALF * slots or len(wave) + len(first) > WAVE * slots
        assert max(r.context for r in wave) >= max(r.context for r in following)


def test_longest_first_and_cut_where_contexts_change() -> None:
    pool = tuple(request(i, i, 100 if i % 2 else 4000) for i in range(2 * HALF))
    assert [{r.context for r in w} for w in cut(pool, lambda _: 1)] == [{4000}, {100}]
    (few,) = cut(pool[:4], lambda _: 1)
    assert [r.context for r in few] == [4000, 4000, 100, 100]


@settings(deadline=None)
@given(pools, st.integers(1, 4))
def test_what_is_held_back_is_less_than_a_half_full_wave_of_like_contexts(
    pool: tuple[PlannedRequest, ...], slots: int
) -> None:
    waves = list(cut(pool, lambda _: slots, closed=False))
    for wave in waves:
        groups = {
            uri: max(r.context for r in wave if r.info.uri == uri)
            for uri in {r.info.uri for r in wave}
        }
        assert len(wave) >= HALF * slots and max(groups.values()) <= LIKE * min(groups.values())
    out = {r.request_id for wave in waves for r in wave}
    left = tuple(r for r in pool if r.request_id not in out)
    assert Counter(r.request_id for w in cut(left, lambda _: slots) for r in w) + Counter(
        out
    ) == ids(pool)


# ------------------------------------------------------------------------------ a sequence of calls


calls = st.lists(st.tuples(pools, st.integers(0, 3)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(calls, st.integers(1, 8), st.integers(1, 3))
def test_over_any_calls_every_request_is_in_one_wave(
    arriving: list[tuple[tuple[PlannedRequest, ...], int]], slots: int, engines: int
) -> None:
    setting = WaveConfig(slots, engines=engines)
    pool: list[PlannedRequest] = []
    seen: Counter[str] = Counter()
    history = History()
    whole = 0
    for part, (new, idle) in enumerate([*arriving, *[((), 10)] * 999]):
        pool += [replace(r, request_id=f"{part}/{r.request_id}") for r in new]
        whole += len(new)
        closed = part >= len(arriving)
        waves = plan(pool, PROFILE, history, idle, closed, setting)
        assert len(waves) <= idle
        assert waves == plan(tuple(pool), PROFILE, history, idle, closed, setting)
        history = history.issued(len(waves))
        out = {r.request_id for wave in waves for r in wave.requests}
        seen.update(r.request_id for wave in waves for r in wave.requests)
        pool = [r for r in pool if r.request_id not in out]
        if closed and not pool:
            break
    assert len(seen) == whole and set(seen.values()) <= {1}


def test_engines_share_the_tail() -> None:
    pool = tuple(request(i, i, 1000) for i in range(40))
    waves = plan(pool, PROFILE, History(), 4, True, WaveConfig(4, engines=4))
    assert [len(w.requests) for w in waves] == [10, 10, 10, 10]


def test_fifty_thousand_are_planned_in_seconds() -> None:
    pool = tuple(request(i, i // 2, 500 + i * 7919 % 60_000) for i in range(50_000))
    began = time.process_time()
    waves = plan(pool, PROFILE, History(), len(pool), True, WaveConfig())
    assert sum(len(w.requests) for w in waves) == len(pool)
    assert time.process_time() - began < 10  # 1.1 s on an idle core


# ---------------------------------------------------------------------------------------- what fits


mixed = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20_000), st.floats(0, 1)), max_size=100
).map(
    lambda found: tuple(
        request(i, video, n, int(n * share)) for i, (video, n, share) in enumerate(found)
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
    setting = WaveConfig(64, draft=draft)  # type: ignore[arg-type]
    assume(any(misfit(r, profile, setting) is None for r in pool))
    waves = plan(pool, profile, History(), 1000, True, setting)
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
            LongestRequest(visual + text, visual, setting.max_tokens, sampling="greedy"),
            wave.max_num_seqs,
            used,
        )
        assert peak_memory(needed) <= MEMORY * memory
    out = {r.request_id for wave in waves for r in wave.requests}
    assert all((r.request_id in out) == (misfit(r, profile, setting) is None) for r in pool)


def test_slots_are_as_many_as_fit() -> None:
    pool = tuple(request(i, i, 100_000) for i in range(100))
    (wave, *_) = plan(pool, PROFILE, History(), 1, True, WaveConfig(32, draft=None))
    row = dict(wave.options[0].memory)["kv"] / wave.max_num_seqs
    needed = peak_memory(dict(wave.options[0].memory))
    assert 1 < wave.max_num_seqs < 32 and needed <= MEMORY * 80e9 < needed + 1.1 * row


def test_where_nothing_fits_the_plan_says_what_would_help() -> None:
    small = replace(PROFILE, device=replace(A100, name="toy", memory=8e9))
    with pytest.raises(UsageError, match=r"toy can give 7\.2.*smaller model"):
        plan((request(0, 0, 100),), small, History(), 1, True, WaveConfig())
    long = request(0, 0, 900_000)
    with pytest.raises(UsageError, match="lower fps"):
        plan((long,), PROFILE, History(), 1, True, WaveConfig())
    error = misfit(long, PROFILE, WaveConfig())
    assert error is not None and error.code == "out_of_memory"
    (wave,) = plan((long, request(1, 1, 100)), PROFILE, History(), 9, True, WaveConfig())
    assert [r.request_id for r in wave.requests] == ["1"]


# -------------------------------------------------------------------------------------- which draft


def test_a_named_draft_is_used_ungated_and_dense_is_dense() -> None:
    pool = (request(0, 0, 100),)
    named = plan(pool, PROFILE, History(), 1, True, WaveConfig(draft=Draft("random", gamma=7)))[0]
    assert named.draft == Draft("random", gamma=7) and named.options[0].speedup < 1
    assert plan(pool, PROFILE, History(), 1, True, WaveConfig(draft=None))[0].draft is None


def test_a_named_draft_that_keeps_another_share_is_expected_to_run_alike() -> None:
    setting = WaveConfig(draft=Draft("std", keep=0.5, gamma=3))
    ways = choose(mix([4000] * 8, setting), PROFILE, History(), setting, 0)
    assert ways[0].draft == setting.draft and ways[0].acceptance == pytest.approx(90.5 / 101)


def test_without_anything_to_choose_from_the_default_drafts() -> None:
    bare = replace(PROFILE, drafts=())
    assert (
        plan((request(0, 0, 100),), bare, History(), 1, True, WaveConfig())[0].draft
        == WaveConfig().default
    )


def test_a_draft_is_chosen_for_a_gain_only() -> None:
    setting = WaveConfig()
    only = replace(PROFILE, drafts=(STD,))
    short, long = (
        choose(mix([n] * 8, setting), only, History(), setting, 0) for n in (200, 60_000)
    )
    assert short[0].draft is None and all(c.speedup < GAIN for c in short[1:])
    assert (
        long[0].draft is not None
        and long[0].speedup >= GAIN
        and long[0].speedup <= long[0].speedup_bound + 0.05
    )
    one = choose(mix([2000], setting), PROFILE, History(), setting, 0)[
        0
    ]  # at B = 1 cheap weights pay
    assert one.draft is not None and one.draft.weights == "int4"


def test_one_time_costs_count_against_short_texts() -> None:
    dear = replace(PROFILE, drafts=(replace(STD, setup=DraftSetupLatency(0.05, 0.0)),))
    long, short = (WaveConfig(max_tokens=n) for n in (128, 4))
    assert choose(mix([60_000] * 8, long), dear, History(), long, 0)[0].draft is not None
    assert choose(mix([60_000] * 8, short), dear, History(), short, 0)[0].draft is None


def test_prefixes_that_rows_share_are_read_once_and_leave_less_to_save() -> None:
    setting = WaveConfig()
    apart = [request(i, i, 30_000) for i in range(8)]
    shared = [request(i, 0, 30_000) for i in range(8)]
    gains = [
        choose(WaveSummary.of(r, setting), PROFILE, History(), setting, 0)[0].speedup
        for r in (apart, shared)
    ]
    assert gains[1] < gains[0]


accounts = st.builds(
    ModelSize,
    layers=st.integers(12, 80),
    hidden=st.sampled_from([2048, 4096, 8192]),
    intermediate=st.sampled_from([8192, 14336, 28672]),
    heads=st.just(32),
    kv_heads=st.sampled_from([2, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    vocabulary=st.just(128_000),
)


@settings(deadline=None)
@given(
    accounts,
    st.integers(1, 8),
    st.floats(0.3, 0.95),
    st.floats(0.1, 0.6),
    st.floats(0, 2e-3),
    st.floats(0, 2e-3),
    st.sampled_from([0.3e12, 2e12, 4.8e12]),
)
def test_the_choice_flips_at_the_latency_crossing(
    model_size: ModelSize,
    rows: int,
    union_fraction: float,
    keep: float,
    c_p: float,
    c_kv: float,
    bandwidth: float,
) -> None:
    """n_lat = n*_B − (c_P − c_KV)/s (Crossover §4.3), for drafts of equal acceptance."""
    sparse = Draft("full", channels=0.3)
    kept = Draft("std", keep=keep)
    profile = replace(
        PROFILE,
        device=replace(A100, bandwidth=bandwidth, memory=1e15),
        model_size=model_size,
        latency=LatencyModel(),
        drafts=(
            CalibratedDraft(sparse, LatencyModel(1.0, c_p), DraftSetupLatency(), GOOD),
            CalibratedDraft(kept, LatencyModel(1.0, c_kv), DraftSetupLatency(), GOOD),
        ),
        union_fractions=(UnionFraction(0.3, rows, union_fraction),),
    )
    s = rows * model_size.entry_bytes * (1 - keep) / bandwidth  # s per token of context
    crossing = crossover_context(model_size, keep, union_fraction, rows) - (c_p - c_kv) / s
    assume(crossing > 200)
    for context, expected in (
        (round(crossing * 0.99) - 2, sparse),
        (round(crossing * 1.01) + 2, kept),
    ):
        ways = choose(
            mix([context] * rows, WaveConfig(rows)), profile, History(), WaveConfig(rows), 0
        )
        best = next(
            c for c in sorted(ways, key=lambda c: c.seconds_per_request) if c.draft is not None
        )
        assert best.draft is not None and best.draft.policy == expected.policy


def test_one_wave_in_fifty_takes_a_dropped_draft_each_in_turn() -> None:
    setting = WaveConfig()
    some = mix([60_000] * 8, setting)
    usual = choose(some, PROFILE, History(), setting, 0)[0].draft
    taken = [choose(some, PROFILE, History(), setting, turn)[0].draft for turn in range(2 * EVERY)]
    others = [draft for draft in taken if draft != usual]
    assert len(others) == 2 and others[0] != others[1]
    pool = tuple(request(i, i, 60_000) for i in range(8))
    waves = plan(pool, PROFILE, History().issued(EVERY - 1), 1, True, setting)
    assert waves[0].draft == others[0]


def test_strict_bounds_gamma_and_widens_every_step() -> None:
    setting = WaveConfig(strict=4)
    ways = choose(mix([60_000] * 8, setting), PROFILE, History(), setting, 0)
    assert all(c.draft is None or c.draft.gamma < 4 for c in ways)
    wide = replace(PROFILE, latency=LatencyModel(1.0, 0, per_token=1.0))
    dense = [
        choose(mix([100], s), wide, History(), s, 0)[0]
        for s in (WaveConfig(draft=None), WaveConfig(draft=None, strict=4))
    ]
    assert dense[1].row_round_s == pytest.approx(dense[0].row_round_s + 3.0)


def test_a_single_row_shares_its_prefix_with_nobody() -> None:
    """Whatever number of questions on the video wait for their turn."""
    alone = WaveSummary(
        1,
        context=1000.0,
        visual=900.0,
        videos=1,
        longest=LongestRequest(1000, 900, 64),
        kinds=(("caption", 1),),
    )
    one_of_ten = WaveSummary(
        10,
        context=1000.0,
        visual=900.0,
        videos=1,
        longest=LongestRequest(1000, 900, 64),
        kinds=(("caption", 10),),
    )
    reads = [Steps(PROFILE, found, 1, 0.0).round(None)[1] for found in (alone, one_of_ten)]
    assert reads[0] == reads[1] == LLAMA.step_bytes([1000])


# ---------------------------------------------------------------------------------- γ within a wave


def test_noise_takes_time_for_every_token_that_is_drawn() -> None:
    profile = replace(PROFILE, sampling_s_per_token=1e-3)
    some = mix([4000] * 8, WaveConfig())
    lookup = CalibratedDraft(Draft("ngram", gamma=5), FLAT, DraftSetupLatency(), GOOD)
    for tried, tokens in ((None, 1), (replace(STD, draft=Draft("std", gamma=5)), 11), (lookup, 6)):
        greedy, drawn = (
            Steps(profile, mix=some, rows=8, grown=0.0, drawn=drawn).round(tried)[0]
            for drawn in (False, True)
        )
        assert drawn - greedy == pytest.approx(8 * tokens * 1e-3)


def scheduled(
    some: WaveSummary,
    profile: Profile,
    setting: WaveConfig,
    history: History | None = None,
    turn: int = 0,
) -> DraftOption:
    """The chosen way, which drafts."""
    chosen = choose(some, profile, history or History(), setting, turn)[0]
    assert chosen.draft is not None and chosen.gamma_schedule is not None
    return chosen


costs = st.builds(
    LatencyModel, st.floats(0.5, 2), st.floats(0, 5e-3), st.floats(0, 1e-4), st.floats(0, 1e-9)
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(100, 60_000), min_size=1, max_size=12),
    st.integers(1, 8),
    st.sampled_from([0, 4, 13]),
    costs,
    costs,
    st.floats(0.2, 2),
    st.floats(0.2, 2),
)
def test_no_pace_has_a_slower_gamma_than_another(
    contexts: list[int],
    slots: int,
    strict: int,
    full: LatencyModel,
    cheap: LatencyModel,
    slow_dense: float,
    slow_draft: float,
) -> None:
    """For each number of rows and acceptance, by the seconds of a token of one row."""
    setting = WaveConfig(slots, strict=strict)
    tried = replace(INT4, latency=cheap)
    profile = replace(PROFILE, latency=full, drafts=(tried,))
    speeds = {(None,): (slow_dense,), (replace(tried.draft, gamma=1),): (slow_draft,)}
    history = History(speeds=speeds)
    some = mix(contexts, setting)
    chosen = choose(some, profile, history, setting, 0)[0]
    assume(chosen.draft is not None)
    assert (
        chosen.draft is not None
        and chosen.gamma_schedule is not None
        and len(chosen.gamma_schedule.gammas) == chosen.slots
    )
    gammas = [g for g in GAMMAS if not strict or g < strict]
    step = Steps(profile, some, min(chosen.slots, len(contexts)), 64.0)
    for g in gammas:  # what rounds of another γ are expected to take follows from the chosen one's
        seconds = (
            step.round(replace(tried, draft=replace(tried.draft, gamma=g)), strict)[0] / step.rows
        )
        assert chosen.row_round_s + (
            g - chosen.draft.gamma
        ) * chosen.row_draft_token_s == pytest.approx(seconds)
    for rows, found in enumerate(chosen.gamma_schedule.gammas, 1):
        step = Steps(profile, some, rows, 64.0)  # half of a usual caption's 128 tokens
        times = {
            g: step.round(replace(tried, draft=replace(tried.draft, gamma=g)), strict)[0]
            for g in gammas
        }
        times = {0: step.round(None, strict)[0] * slow_dense} | {
            g: t * slow_draft for g, t in times.items()
        }
        assert len(found) == LEVELS
        for level, gamma in enumerate(found):
            a = (level + 0.5) / LEVELS
            each = {g: seconds / AcceptanceCurve((a,)).tokens(g) for g, seconds in times.items()}
            assert each[gamma] <= min(each.values()) * (1 + 1e-9)


def test_a_pace_drafts_more_where_more_is_accepted_and_less_where_rows_share_the_weights() -> None:
    setting = WaveConfig()
    int4 = replace(INT4, draft=Draft("full", weights="int4"))
    cheap = scheduled(mix([20_000], setting), replace(PROFILE, drafts=(int4,)), setting)
    assert (
        cheap.gamma_schedule is not None
        and cheap.gamma_schedule.gammas[0][0]
        == 0
        < cheap.gamma_schedule.gammas[0][-1]
        == cheap.gamma_schedule.max_gamma
    )
    for row in cheap.gamma_schedule.gammas:
        assert list(row) == sorted(row)
    alone, full = (
        sum(cheap.gamma_schedule.gammas[i]) for i in (0, -1)
    )  # fewer bytes of weights are nothing new to 8 rows
    assert alone > full
    assert cheap.gamma_schedule.expected_acceptance == pytest.approx(cheap.acceptance)


def test_a_pace_has_what_the_slots_have_room_for() -> None:
    """More drafted tokens take more memory; there are never fewer slots for it."""
    setting = WaveConfig(64)
    load = LongestRequest(20_100, 20_000, 256, sampling="greedy")
    pool = [request(i, i, load.context, load.visual) for i in range(64)]

    def planned(memory: float) -> Wave:
        profile = replace(PROFILE, device=replace(A100, memory=memory), drafts=(STD,))
        return plan(pool, profile, History(), 1, True, setting)[0]

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
    tight = planned((needed + 1) / MEMORY)
    assert (tight.max_num_seqs, tight.draft) == (wide.max_num_seqs, wide.draft)
    assert tight.gamma_schedule is not None and tight.gamma_schedule.max_gamma == wide.draft.gamma


def test_a_named_draft_keeps_its_gamma_and_one_that_is_explored_its_gate_open() -> None:
    pool = (request(0, 0, 60_000),)
    for draft in (Draft("std", gamma=7), None):
        (wave,) = plan(pool, PROFILE, History(), 1, True, WaveConfig(draft=draft))
        assert wave.gamma_schedule is None and wave.engine_config.draft == draft
    bare = plan(pool, replace(PROFILE, drafts=()), History(), 1, True, WaveConfig())[0]
    assert bare.gamma_schedule is None
    setting = WaveConfig()
    some = mix([60_000] * 8, setting)
    usual, explored = (
        scheduled(some, PROFILE, setting, turn=turn).gamma_schedule for turn in (0, 2 * EVERY - 1)
    )
    assert usual is not None and usual.min_gamma == 0
    assert explored is not None and explored.min_gamma > 0


def test_a_second_model_drafts_in_every_round() -> None:
    small = replace(LLAMA, layers=2, parameters=10**9)
    pair = CalibratedDraft(
        Draft("specvlm", model="small"),
        latency=LatencyModel(1.0, 1e-4),
        setup=DraftSetupLatency(),
        acceptance=GOOD,
        second_model=small,
    )
    setting = WaveConfig()
    chosen = scheduled(mix([60_000] * 8, setting), replace(PROFILE, drafts=(pair,)), setting)
    assert chosen.gamma_schedule is not None and chosen.gamma_schedule.min_gamma == 1


def test_setups_of_one_draft_are_alike_whatever_their_pace() -> None:
    """So that rows of one wave need not be through before the next one's come."""
    pool = tuple(request(i, i, 60_000 - 400 * i) for i in range(60))
    waves = plan(pool, PROFILE, History(), 9, True, WaveConfig(2))
    assert len(waves) > 1 and len({wave.gamma_schedule for wave in waves}) > 1
    assert len({wave.engine_config for wave in waves}) == 1
