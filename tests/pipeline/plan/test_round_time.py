from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.round_time import RoundPredictor
from pipeline.plan.settings import WaveSummary
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PrefillLatency,
    Profile,
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
PROFILE = Profile(
    A100,
    model="m",
    dtype="bfloat16",
    model_size=LLAMA,
    latency=FLAT,
    prefill=PrefillLatency(0.0, 1e-4, 0.0),
    vision_s_per_token=1e-5,
)


def wave(count: int, context: int, videos: int) -> WaveSummary:
    return WaveSummary(
        count,
        context=float(context),
        visual=0.9 * context,
        videos=videos,
        longest=LongestRequest(context, round(0.9 * context), 64),
        kinds=(("caption", count),),
    )


def test_a_single_row_reads_one_prefix() -> None:
    """However many questions on the video wait for a slot."""
    reads = [
        RoundPredictor(PROFILE, wave(count, 1000, videos=1), rows=1, generated=0.0)
        .round(None)
        .bytes_read
        for count in (1, 10)
    ]
    assert reads[0] == reads[1] == LLAMA.step_bytes([1000])


@pytest.mark.parametrize(
    ("draft", "sampled_tokens"), [(None, 1), (Draft("std"), 11), (Draft("ngram"), 6)]
)
def test_noise_takes_time_for_every_sampled_token(draft: Draft | None, sampled_tokens: int) -> None:
    """Of γ = 5 drafted tokens and 6 verified ones; prompt lookup samples nothing."""
    profile = replace(PROFILE, sampling_s_per_token=1e-3)
    calibrated = None if draft is None else CalibratedDraft(draft, FLAT, DraftSetupLatency(), ())
    greedy, sampled = (
        RoundPredictor(profile, wave(8, 4000, videos=8), rows=8, generated=0.0, sampled=sampled)
        .round(calibrated)
        .seconds
        for sampled in (False, True)
    )
    assert sampled - greedy == pytest.approx(8 * sampled_tokens * 1e-3)
