from __future__ import annotations

import pytest

from pipeline.report.tally import Tally
from tests.pipeline.report.stub_events import failed, row


def test_a_tally_is_the_sum_of_its_rows() -> None:
    tally = Tally()
    rows = (
        row("a"),
        row("b", status="truncated"),
        failed("c", "empty_file"),
        failed("d", "empty_file"),
    )
    for one in rows:
        tally.add(one)
    assert (tally.succeeded, tally.failed, tally.answered) == (2, {"empty_file": 2}, 4)
    assert (tally.tokens, tally.rounds, tally.proposed, tally.accepted) == (60, 20, 100, 40)
    assert tally.engine_seconds == pytest.approx(1.6)
