from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.round_time import RoundPredictor
from pipeline.plan.settings import WaveSummary
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.profile import (
    CalibratedDraft,
    DraftSetupLatency,
)
from std_core.types import Draft
from tests.pipeline.plan.stub_plan import (
    FLAT,
    LLAMA,
    PROFILE,
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
