from __future__ import annotations

from pipeline.report.overview import headline
from tests.pipeline.report.stub_data import data_of, failed, row


def test_headline_gives_counts_speed_failures_and_gain_of_drafting() -> None:
    rows = [
        *(row(n) for n in range(27)),
        failed(27, "empty_file"),
        failed(28, "not_found"),
        failed(29, "not_found"),
    ]
    assert headline(data_of(rows)) == (
        "27 of 30 requests answered in 30 s: 54 a minute, 54 tokens a second. "
        "3 failed: 2 not_found, 1 empty_file. "
        "Drafting read 25% of the context and had 3.92 tokens accepted per round, "
        "so a pass of the full model yielded 4.92 tokens instead of 1."
    )


def test_headline_where_every_request_failed() -> None:
    rows = [failed(n, "not_a_video" if n % 3 else "empty_file") for n in range(40)]
    assert (
        headline(data_of(rows))
        == "None of 40 requests was answered (in 30 s). 40 failed: 26 not_a_video, 14 empty_file."
    )


def test_headline_of_dense_rows_says_nothing_of_drafting() -> None:
    dense = {"draft": "dense", "proposed": 0, "accepted": 0, "rounds": 60}
    assert "Drafting" not in headline(data_of([row(n, **dense) for n in range(5)]))
