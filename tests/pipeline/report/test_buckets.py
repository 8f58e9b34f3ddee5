from __future__ import annotations

import pytest

from pipeline.report.buckets import Speedup, bucket_stats, speedups
from tests.pipeline.report.stub_data import data_of, failed, row


def test_buckets_add_up_by_context_and_draft() -> None:
    rows = [
        row(0, num_visual_tokens=472, accepted=30),
        row(1, num_visual_tokens=473),
        row(2, num_visual_tokens=900),
        row(3, draft="dense", proposed=0, accepted=0, rounds=60, decode_s=0.6),
        failed(4, "not_found"),
    ]
    stats = bucket_stats(data_of(rows))
    assert [(one.max_context, one.draft, one.rows) for one in stats] == [
        (512, "std", 1),
        (1024, "dense", 1),
        (1024, "std", 2),
    ]
    short, _, drafted = stats
    assert short.acceptance == 0.5
    assert short.acceptance_error == 0.0
    assert drafted.acceptance == pytest.approx(47 / 60)
    assert drafted.phase_seconds == pytest.approx({"vision": 0.2, "prefill": 0.4, "decode": 0.6})
    assert speedups(stats) == [Speedup(1024, pytest.approx(2.0), pytest.approx(59 / 12))]
