"""Why a wave is decoded as it is, and the plan as an operator reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.dryrun import PlanningInputs, report
from pipeline.plan.history import History
from pipeline.plan.plan_table import table
from pipeline.plan.reason import explain_choice, what_is_saved
from pipeline.plan.settings import WaveConfig
from pipeline.plan.waves import plan
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.profile import Profile
from std_core.types import Draft
from tests.pipeline.plan.stub_plan import A100, BAD, LLAMA, PROFILE, planned_request


def reason(profile: Profile, config: WaveConfig, context: int = 60_000) -> str:
    requests = [planned_request(0, 0, context)]
    (wave,) = plan(requests, profile, History(), idle_engines=1, closed=True, config=config)
    return explain_choice(wave.options, profile, config)


CPU_PROFILE = estimated_profile(
    replace(A100, name="cpu", kind="cpu", flops=1e12), LLAMA, "m", "bfloat16"
)


@pytest.mark.parametrize(
    ("profile", "config", "said"),
    [
        (PROFILE, WaveConfig(1), "of its tokens are accepted, and decoding is"),
        (PROFILE, WaveConfig(1, draft=None), "dense, as --mode dense asks for"),
        (PROFILE, WaveConfig(1, draft=Draft("std", keep=0.3)), "std 0.3 γ5, as the command line"),
        (replace(PROFILE, drafts=(BAD,)), WaveConfig(1), "times as fast, and 1.05 is needed"),
        (replace(PROFILE, drafts=()), WaveConfig(1), "dense: no draft was calibrated"),
        (CPU_PROFILE, WaveConfig(1), "dense: nothing was measured on this machine"),
    ],
)
def test_the_reason_is_one_sentence(profile: Profile, config: WaveConfig, said: str) -> None:
    found = reason(profile, config)
    assert said in found and "\n" not in found


@pytest.mark.parametrize(
    ("draft", "saved"),
    [
        (Draft("ngram"), ["no weights and no KV entries"]),
        (Draft("std", keep=0.25), ["25% of the visual KV entries"]),
        (Draft("std", k=64, weights="int8"), ["64 of the visual KV entries", "int8 weights"]),
        (Draft("full", channels=0.5), ["50% of the input channels"]),
        (Draft("full", depth=0.5), ["50% of the layers"]),
        (Draft("specvlm", model="x"), ["a smaller model", "20% of the visual KV entries"]),
        (Draft("full"), ["all weights and KV entries"]),
    ],
)
def test_what_a_draft_reads_less_of(draft: Draft, saved: list[str]) -> None:
    assert what_is_saved(draft) == saved


def test_a_small_plan_has_no_zero_hours_and_no_plural_of_one() -> None:
    requests = [planned_request(0, 0, 200)]
    config = WaveConfig()
    waves = plan(requests, PROFILE, History(), idle_engines=1, closed=True, config=config)
    figures = report(waves, [], PlanningInputs(PROFILE, config, price_per_hour=2.0))
    text = table(figures, [])
    assert "1 request on 1 video: 1 s of footage, 1 frame to decode" in text
    assert "1 wave\n  1 request of 200 tokens" in text
    assert "less than 1 s" in text and "0 (0 to 0)" not in text
    assert "cost: 0.00, in the currency of --price-per-hour" in text
    assert figures["buckets"]["256"]["reason"] in text
