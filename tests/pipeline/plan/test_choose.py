from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.plan.choose import (
    ACCEPTANCE_CLASSES,
    EXPLORATION_INTERVAL,
    GAMMAS,
    MIN_SPEEDUP,
    DraftPlanner,
)
from pipeline.plan.history import History
from pipeline.plan.round_time import RoundPredictor
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption
from std_core.cost_model.acceptance import (
    AcceptanceCounts,
    AcceptanceCurve,
    KeepAgreement,
    log_odds,
)
from std_core.cost_model.crossover import crossover_context
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    Profile,
    UnionFraction,
)
from std_core.types import Draft
from tests.pipeline.plan.stub_plan import (
    A100,
    GOOD,
    INT4,
    LLAMA,
    PROFILE,
    STD,
)


def wave_of(contexts: list[int], config: WaveConfig, videos: int | None = None) -> WaveSummary:
    """Captions of videos whose tokens are all visual."""
    mean = sum(contexts) / len(contexts)
    longest = LongestRequest(
        max(contexts),
        visual=max(contexts),
        max_tokens=config.max_tokens,
        chunk=config.prefill_chunk,
        strict_width=config.strict,
        sampling=config.sampling_mode,
    )
    return WaveSummary(
        len(contexts),
        context=mean,
        visual=mean,
        videos=videos or len(contexts),
        longest=longest,
        kinds=(("caption", len(contexts)),),
    )


def options_of(
    contexts: list[int], config: WaveConfig, profile: Profile = PROFILE, wave_index: int = 0
) -> tuple[DraftOption, ...]:
    wave = wave_of(contexts, config)
    return DraftPlanner(profile, History(), config).options(wave, wave_index)


def chosen_draft(
    contexts: list[int], config: WaveConfig, profile: Profile = PROFILE
) -> DraftOption:
    """The chosen option, which drafts with a γ schedule."""
    chosen = options_of(contexts, config, profile)[0]
    assert chosen.draft is not None and chosen.gamma_schedule is not None
    return chosen


# --- which draft ----------------------------------------------------------------------------------


def test_a_draft_that_keeps_another_share_takes_the_calibration_of_its_family() -> None:
    config = WaveConfig(draft=Draft("std", keep=0.5, gamma=3))
    chosen = options_of([4000] * 8, config)[0]
    assert chosen.draft == config.draft and chosen.acceptance == pytest.approx(90.5 / 101)


def test_a_draft_is_chosen_only_for_a_speedup() -> None:
    std_only = replace(PROFILE, drafts=(STD,))
    short = options_of([200] * 8, WaveConfig(), std_only)
    assert short[0].draft is None
    assert all(option.speedup < MIN_SPEEDUP for option in short[1:])
    long = options_of([60_000] * 8, WaveConfig(), std_only)[0]
    assert long.draft is not None
    assert MIN_SPEEDUP <= long.speedup <= long.speedup_bound + 0.05
    single = options_of([2000], WaveConfig())[0]  # at B = 1, cheap weights pay
    assert single.draft is not None and single.draft.weights == "int4"


def test_setup_time_counts_against_short_texts() -> None:
    slow_setup = replace(PROFILE, drafts=(replace(STD, setup=DraftSetupLatency(0.05, 0.0)),))
    contexts = [60_000] * 8
    assert options_of(contexts, WaveConfig(max_tokens=128), slow_setup)[0].draft is not None
    assert options_of(contexts, WaveConfig(max_tokens=4), slow_setup)[0].draft is None


def test_a_shared_prefix_is_read_once_and_leaves_less_to_save() -> None:
    config = WaveConfig()
    planner = DraftPlanner(PROFILE, History(), config)
    own, shared = (
        planner.options(wave_of([30_000] * 8, config, videos), 0)[0].speedup for videos in (8, 1)
    )
    assert shared < own


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
def test_the_choice_flips_at_the_latency_crossover(
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
        options = DraftPlanner(profile, History(), WaveConfig(rows)).options(
            wave_of([context] * rows, WaveConfig(rows)), 0
        )
        best = next(
            c for c in sorted(options, key=lambda c: c.seconds_per_request) if c.draft is not None
        )
        assert best.draft is not None and best.draft.policy == expected.policy


def test_one_wave_in_fifty_takes_a_rejected_draft_each_in_rotation() -> None:
    usual, *others = options_of([60_000] * 8, WaveConfig())
    drafts = [
        options_of([60_000] * 8, WaveConfig(), wave_index=index)[0].draft
        for index in range(2 * EXPLORATION_INTERVAL)
    ]
    explored = [draft for draft in drafts if draft != usual.draft]
    assert len(explored) == 2 and explored[0] != explored[1]
    assert set(explored) <= {option.draft for option in others}


def test_strict_bounds_gamma_and_pads_every_verification() -> None:
    options = options_of([60_000] * 8, WaveConfig(strict=4))
    assert all(option.draft is None or option.draft.gamma < 4 for option in options)
    per_token = replace(PROFILE, latency=LatencyModel(1.0, 0, per_token=1.0))
    one, four = (
        options_of([100], WaveConfig(draft=None, strict=strict), per_token)[0] for strict in (0, 4)
    )
    assert four.row_round_s == pytest.approx(one.row_round_s + 3.0)


# --- without a measurement ------------------------------------------------------------------------

CPU = Device("cpu", kind="cpu", bandwidth=2e10, memory=64e9, flops=5e11)
UNMEASURED = estimated_profile(CPU, LLAMA, "m", "bfloat16")
MUCH_WORK = 1_000_000  # requests


def unmeasured_choice(history: History, wave_index: int, remaining: int = MUCH_WORK) -> DraftOption:
    config = WaveConfig(1)
    planner = DraftPlanner(UNMEASURED, history, config)
    return planner.options(wave_of([30_000], config), wave_index, remaining)[0]


def test_where_nothing_was_measured_waves_decode_densely_or_try_a_draft() -> None:
    drafts = [unmeasured_choice(History(), index).draft for index in range(12)]
    policies = [draft.policy if draft else "dense" for draft in drafts]
    assert policies == ["dense", "std", "ngram", *["dense"] * 9]
    tried = unmeasured_choice(History(), 1)
    assert tried.gamma_schedule is not None and tried.gamma_schedule.min_gamma > 0


def test_a_trial_needs_work_that_it_could_pay_for() -> None:
    assert unmeasured_choice(History(), 1, remaining=9).draft is None
    assert unmeasured_choice(History(), 1, remaining=10).draft is not None


@pytest.mark.parametrize(("ratio", "pays"), [(0.3, True), (3.0, False)])
def test_what_a_trial_shows_is_used_from_then_on(ratio: float, pays: bool) -> None:
    """Rounds much faster than predicted, or three times slower."""
    std = UNMEASURED.drafts[0].draft
    history = History(
        acceptance_curves={
            (replace(std, gamma=1), "caption"): (AcceptanceCurve((0.95,)),),
        },
        time_ratios={(replace(std, gamma=1),): (ratio,), (None,): (1.0,)},
    )
    chosen = unmeasured_choice(history, 20)
    assert (chosen.draft is not None and chosen.draft.policy == "std") == pays


# --- keep -----------------------------------------------------------------------------------------


def with_agreements(rates: dict[float, float], accepted: int = 90) -> CalibratedDraft:
    """The draft `std`, with its agreement at some keeps.

    Args:
        accepted: percent of the drafted tokens that rounds at keep 0.2 accepted.
    """
    return replace(
        STD,
        acceptance=(AcceptanceCounts(4096, "caption", (accepted,), (100 - accepted,)),),
        keep_agreements=tuple(
            KeepAgreement(keep, context=4096, agreed=round(1000 * rate), tokens=1000)
            for keep, rate in rates.items()
        ),
    )


@pytest.mark.parametrize(
    ("rates", "accepted", "keep"),
    [
        ({0.05: 0.9, 0.2: 0.9, 0.5: 0.9}, 90, 0.05),  # more entries gain nothing
        ({0.05: 0.1, 0.2: 0.3, 0.5: 0.97}, 30, 0.5),  # fewer lose nearly all
        ({0.05: 0.1, 0.2: 0.9, 0.5: 0.93}, 90, 0.2),
    ],
)
def test_the_keep_is_what_acceptance_and_bytes_make_fastest(
    rates: dict[float, float], accepted: int, keep: float
) -> None:
    profile = replace(PROFILE, drafts=(with_agreements(rates, accepted),))
    chosen = chosen_draft([120_000] * 4, WaveConfig(4), profile)
    assert chosen.draft is not None and chosen.draft.keep == keep


def test_a_longer_context_keeps_a_smaller_share() -> None:
    """Weights take most of a short context's time, so that acceptance counts for more."""
    rates = {0.03: 0.7, 0.1: 0.86, 0.3: 0.93, 0.6: 0.96}
    profile = replace(PROFILE, drafts=(with_agreements(rates),))
    keeps = []
    for context in (4_000, 30_000, 120_000):
        options = options_of([context] * 4, WaveConfig(4), profile)
        keeps += [option.draft.keep for option in options if option.draft is not None]
    assert len(keeps) == 3 and keeps == sorted(keeps, reverse=True) and keeps[0] > keeps[-1]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([0.05, 0.1, 0.2, 0.4]), st.floats(0.05, 0.99), min_size=1, max_size=4
    ),
    st.integers(500, 200_000),
    st.integers(1, 8),
)
def test_no_calibrated_keep_and_gamma_is_faster_than_the_offered_one(
    rates: dict[float, float], context: int, rows: int
) -> None:
    calibrated = with_agreements(rates)
    planner = DraftPlanner(replace(PROFILE, drafts=(calibrated,)), History(), WaveConfig(rows))
    wave = wave_of([context] * rows, WaveConfig(rows))
    options = planner.options(wave, 0)
    (offered,) = [option for option in options if option.draft is not None]
    assert offered.draft is not None and offered.draft.keep in rates
    for keep in rates:
        for gamma in GAMMAS:
            other = calibrated.with_draft(Draft("std", keep=keep, gamma=gamma))
            predicted = planner.predict(other, wave)
            assert predicted is not None
            assert offered.seconds_per_request <= predicted.seconds_per_request * (1 + 1e-9)


def test_what_a_run_shows_at_one_keep_moves_the_others() -> None:
    """In log odds, so that a poor acceptance at one keep makes the others poorer too."""
    calibrated = with_agreements({0.1: 0.5, 0.2: 0.9})
    planner = DraftPlanner(replace(PROFILE, drafts=(calibrated,)), History(), WaveConfig(4))
    wave = wave_of([60_000] * 4, WaveConfig(4))
    seen = History(
        acceptance_curves={(Draft("std", keep=0.2, gamma=1), "caption"): (AcceptanceCurve((0.5,)),)}
    )
    before, after = (
        replace(planner, history=history).predict(
            calibrated.with_draft(Draft("std", keep=0.1)), wave
        )
        for history in (History(), seen)
    )
    assert before is not None and after is not None
    level = calibrated.acceptance_curve(60_000, "caption").at(0)
    assert log_odds(before.acceptance) - log_odds(after.acceptance) == pytest.approx(
        log_odds(level), abs=0.02
    )


# --- γ within a wave ------------------------------------------------------------------------------


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
def test_every_gamma_of_a_schedule_is_the_fastest(
    contexts: list[int],
    slots: int,
    strict: int,
    full: LatencyModel,
    cheap: LatencyModel,
    slow_dense: float,
    slow_draft: float,
) -> None:
    """For each number of rows and acceptance, by the seconds of a token of one row."""
    config = WaveConfig(slots, strict=strict)
    calibrated = replace(INT4, latency=cheap)
    profile = replace(PROFILE, latency=full, drafts=(calibrated,))
    time_ratios: dict[tuple[object, ...], tuple[float, ...]] = {
        (None,): (slow_dense,),
        (replace(calibrated.draft, gamma=1),): (slow_draft,),
    }
    wave = wave_of(contexts, config)
    chosen = DraftPlanner(profile, History(time_ratios=time_ratios), config).options(wave, 0)[0]
    assume(chosen.draft is not None)
    assert chosen.draft is not None and chosen.gamma_schedule is not None
    assert len(chosen.gamma_schedule.gammas) == chosen.slots
    drafts = {
        gamma: replace(calibrated, draft=replace(calibrated.draft, gamma=gamma))
        for gamma in GAMMAS
        if not strict or gamma < strict
    }

    def latency(rows: int) -> RoundPredictor:
        generated = 64.0  # half of a usual caption's 128 tokens
        return RoundPredictor(
            profile, wave, rows=rows, generated=generated, min_verify_width=strict
        )

    mean_rows = latency(min(chosen.slots, len(contexts)))
    for gamma, draft in drafts.items():  # predicted from the chosen option's γ and times
        predicted = chosen.row_round_s + (gamma - chosen.draft.gamma) * chosen.row_draft_token_s
        assert predicted == pytest.approx(mean_rows.round(draft).seconds / mean_rows.rows)
    for rows, found in enumerate(chosen.gamma_schedule.gammas, 1):
        seconds = {0: latency(rows).round(None).seconds * slow_dense}
        for gamma, draft in drafts.items():
            seconds[gamma] = latency(rows).round(draft).seconds * slow_draft
        assert len(found) == ACCEPTANCE_CLASSES
        for index, gamma in enumerate(found):
            acceptance = (index + 0.5) / ACCEPTANCE_CLASSES
            per_token = {
                g: s / AcceptanceCurve((acceptance,)).tokens(g) for g, s in seconds.items()
            }
            assert per_token[gamma] <= min(per_token.values()) * (1 + 1e-9)


def test_gamma_grows_with_acceptance_and_shrinks_as_rows_share_the_weights() -> None:
    int4 = replace(INT4, draft=Draft("full", weights="int4"))
    chosen = chosen_draft([20_000], WaveConfig(), replace(PROFILE, drafts=(int4,)))
    assert chosen.gamma_schedule is not None
    one_row, *_, all_rows = chosen.gamma_schedule.gammas
    assert one_row[0] == 0 < one_row[-1] == chosen.gamma_schedule.max_gamma
    for by_acceptance in chosen.gamma_schedule.gammas:
        assert list(by_acceptance) == sorted(by_acceptance)
    assert sum(one_row) > sum(all_rows)
    assert chosen.gamma_schedule.expected_acceptance == pytest.approx(chosen.acceptance)


def test_an_explored_draft_never_decodes_densely() -> None:
    usual, explored = (
        options_of([60_000] * 8, WaveConfig(), wave_index=index)[0].gamma_schedule
        for index in (0, 2 * EXPLORATION_INTERVAL - 1)
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
    chosen = chosen_draft([60_000] * 8, WaveConfig(), replace(PROFILE, drafts=(pair,)))
    assert chosen.gamma_schedule is not None and chosen.gamma_schedule.min_gamma == 1
