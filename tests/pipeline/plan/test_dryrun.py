from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.dryrun import PlanningInputs, predicted_seconds, report
from pipeline.plan.history import History
from pipeline.plan.plan_table import table
from pipeline.plan.reason import describe_draft
from pipeline.plan.settings import WaveConfig
from pipeline.plan.waves import plan
from pipeline.records import (
    FailedRequest,
    InputRow,
    PendingRequest,
    PlannedRequest,
    RequestError,
    Wave,
)
from std_core.cost_model.device_specs import QUOTED_DEVICES, estimated_profile, published_device
from std_core.cost_model.profile import PrefillLatency, Profile
from std_core.types import Draft
from tests.pipeline.plan.stub_plan import (
    LLAMA,
    planned_request,
)

MODEL = replace(LLAMA, parameters=9_030_000_000, tower=10**8, tower_width=1024)
H100_PROFILE = estimated_profile(published_device("H100"), MODEL, "m", "bfloat16")


def request(number: int, video: int, visual: int = 30_000, text: int = 100) -> PlannedRequest:
    return planned_request(number, video, visual + text, visual=visual, duration=36.0)


def waves_of(requests: list[PlannedRequest], profile: Profile) -> tuple[Wave, ...]:
    return plan(requests, profile, History(), idle_engines=99, closed=True, config=WaveConfig())


def test_a_video_is_encoded_and_prefilled_once() -> None:
    profile = replace(H100_PROFILE, vision_s_per_token=1e-3, prefill=PrefillLatency(0.5, 1e-3, 0.0))
    once = predicted_seconds(waves_of([request(0, 0)], profile), profile)
    assert once["vision"] == pytest.approx(30.0) and once["prefill"] == pytest.approx(0.5 + 30.1)
    twice = predicted_seconds(waves_of([request(0, 0), request(1, 0)], profile), profile)
    assert twice["vision"] == pytest.approx(30.0) and twice["prefill"] == pytest.approx(
        0.5 + 30.1 + 0.5 + 0.1
    )
    assert twice["decode"] > once["decode"]


def test_a_report_has_slots_drafts_hours_and_cost() -> None:
    requests = [
        *(request(i, i) for i in range(200)),
        *(request(200 + i, 200 + i, 800) for i in range(100)),
    ]
    found = waves_of(requests, H100_PROFILE)
    failure = FailedRequest(
        PendingRequest("x", InputRow("v", "?")), RequestError("context_too_long", "it is too long")
    )
    figures = report(found, [failure], PlanningInputs(H100_PROFILE, WaveConfig(), 2.0))
    assert figures["requests"] == 301 and figures["failures"] == {"context_too_long": 1}
    assert set(figures["buckets"]) == {"32768", "1024"}
    for bucket in figures["buckets"].values():
        assert bucket["slots"] == [8] and sum(bucket["drafts"].values()) == bucket["requests"]
        best = bucket["candidates"][0]
        assert best["gain"] >= 1.05 and best["draft"] in bucket["drafts"] and best["bound"] > 1
        assert sum(bucket["memory_gb"].values()) < 80 * 0.9
        assert best["gammas"][0] < best["gammas"][1] and all(
            c["gammas"] == [] for c in bucket["candidates"][1:]
        )
    assert figures["buckets"]["1024"]["crossover"] == figures["buckets"]["32768"]["crossover"]
    assert sum(figures["shares"].values()) == pytest.approx(1, abs=1e-3)
    low, expected, high = figures["engine_hours"]
    assert low < expected < high and figures["cost"][1] == pytest.approx(2 * expected, abs=0.01)
    assert figures["engine_hours_elsewhere"]["H100"] == figures["engine_hours"]
    assert set(figures["engine_hours_elsewhere"]) == set(QUOTED_DEVICES)
    text = table(figures, [failure])
    assert "{} ({}–{})".format(best["draft"], *best["gammas"]) in text
    assert (
        "published" in text and "context_too_long: it is too long" in text and "too small" in text
    )
    assert figures["engine_hours_elsewhere"]["L4"] is None  # 32K × 9B needs more than 24 GB


def test_a_draft_is_described_by_policy_share_weights_and_gamma() -> None:
    names = {
        None: "dense",
        Draft(): "std 0.2 γ5",
        Draft(k=960, gamma=3): "std 960 γ3",
        Draft("ngram", gamma=4): "ngram γ4",
        Draft("full", channels=0.5): "full channels 0.5 γ5",
        Draft("full", depth=0.5, weights="int8"): "full int8 depth 0.5 γ5",
        Draft("specvlm", keep=0.3, model="small"): "specvlm 0.3 by small γ5",
    }
    assert {draft: describe_draft(draft) for draft in names} == names
