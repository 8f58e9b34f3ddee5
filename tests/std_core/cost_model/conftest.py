from __future__ import annotations

from dataclasses import replace

import pytest

from std_core.cost_model.acceptance import AcceptanceCounts, KeepAgreement
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    FitError,
    LatencyModel,
    PrefillLatency,
    Profile,
    RetrievalScore,
    TextLength,
    UnionFraction,
)
from std_core.types import Draft

SIZE = ModelSize(
    2,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    parameters=1000,
)


@pytest.fixture
def profile() -> Profile:
    return Profile(
        Device("d", kind="cpu", bandwidth=1e10, memory=1e9, flops=1e12),
        model="m",
        dtype="float32",
        model_size=SIZE,
        latency=LatencyModel(
            1.5, constant=1e-3, per_token=2e-4, per_entry=1e-7, residual=FitError(0.01, 0.1)
        ),
        prefill=PrefillLatency(0.1, 1e-4, 1e-9),
        vision_s_per_token=1e-5,
        drafts=(
            CalibratedDraft(
                Draft("std"),
                latency=LatencyModel(),
                setup=DraftSetupLatency(1e-3, 1e-6),
                acceptance=(
                    AcceptanceCounts(512, "caption", (9,), (1,)),
                    AcceptanceCounts(8192, "caption", (6,), (4,)),
                ),
                retrieval_scores=(
                    RetrievalScore(512, 32, 30, 29),
                    RetrievalScore(8192, 32, 28, 12),
                ),
                keep_agreements=(
                    KeepAgreement(0.1, context=512, agreed=60, tokens=100),
                    KeepAgreement(0.2, context=512, agreed=90, tokens=100),
                ),
            ),
            CalibratedDraft(
                Draft("specvlm", model="x"),
                latency=LatencyModel(),
                setup=DraftSetupLatency(),
                acceptance=(
                    AcceptanceCounts(
                        512, kind="question", accepted=(1, 0), rejected=(1, 1), sampled=True
                    ),
                ),
                second_model=replace(SIZE, layers=1),
            ),
        ),
        union_fractions=(UnionFraction(0.5, 1, 0.5), UnionFraction(0.5, 8, 0.95)),
        text_lengths=(TextLength("caption", 90.0),),
    )
