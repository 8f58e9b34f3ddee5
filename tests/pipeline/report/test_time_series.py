from __future__ import annotations

from datetime import datetime, timezone

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.report.time_series import MAX_BINS, bin_edges, utilization
from tests.pipeline.report.stub_data import START, data_of, row, run_of


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.floats(0.01, 500), st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=40
    ),
    engines=st.integers(1, 4),
)
def test_utilization_is_at_most_1_and_no_work_is_lost(
    rows: list[tuple[float, float, float]], engines: int
) -> None:
    # rows: seconds of pause, prefill and decoding; so the time before a row suffices for its work
    table = []
    elapsed = 0.0
    for number, (pause, prefill, decode) in enumerate(rows):
        elapsed += pause + prefill + decode
        created = datetime.fromtimestamp(START + elapsed, timezone.utc)
        table.append(
            row(number, created_at=created, vision_s=0.0, prefill_s=prefill, decode_s=decode)
        )
    data = data_of(table, [run_of(elapsed + 1, about={"engines": engines})])
    shares = utilization(data)
    edges = bin_edges(data)
    assert all(share.shape == (len(edges) - 1,) for share in shares.values())
    assert all((share >= 0).all() for share in shares.values())
    assert (sum(shares.values()) <= 1 + 1e-9).all()
    work = {phase: (share * np.diff(edges)).sum() * engines for phase, share in shares.items()}
    expected = {
        "vision": 0.0,
        "prefill": sum(prefill for _, prefill, _ in rows),
        "decode": sum(decode for _, _, decode in rows),
    }
    assert work == pytest.approx(expected, abs=1e-3)
    assert (np.diff(edges) >= 0.99).all()
    assert len(edges) <= MAX_BINS + 1
