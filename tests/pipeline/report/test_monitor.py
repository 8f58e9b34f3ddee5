from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.records import RequestError, RunError, RunSnapshot, Wave
from pipeline.report.monitor import RunMonitor
from pipeline.report.runs import Sample, WaveRecord, read_runs
from tests.pipeline.report.stub_events import failed, planned, row


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """A source whose batches are all ready."""

    def __init__(self, *batches: str):
        self.left = list(batches)

    @property
    def closed(self) -> bool:
        return not self.left

    def take(self, seconds: float = 0.0) -> str | None:
        return self.left.pop(0) if self.left else None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def monitor(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> Iterator[RunMonitor]:
    """A monitor that writes its progress to the log."""
    caplog.set_level(logging.INFO, logger="pipeline")
    with RunMonitor(
        str(tmp_path),
        about={"model": "demo"},
        rows_written=lambda: 0,
        console=Console(file=io.StringIO()),
        clock=clock,
    ) as made:
        yield made


def test_log_messages_say_what_is_done_and_how_long_the_rest_takes(
    monitor: RunMonitor, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    source = monitor.count_requests(Batches("abc", "defgh"))
    assert [source.take(), source.take(), source.take()] == ["abc", "defgh", None]
    clock.now += 5
    monitor.update(RunSnapshot(decoding=2, waiting=3, engines=0, starting=1, frame_bytes=7_000_000))
    monitor.record_row(failed("a", "not_a_video"))
    monitor.record_row(row("b"))
    clock.now += 1
    monitor.update(RunSnapshot())  # too early for another message
    clock.now += 4
    monitor.update(
        RunSnapshot(decoding=2, in_engine=3, suspects=1, deaths=1, frame_bytes=7_000_000)
    )
    assert caplog.messages == [
        "[5 s] 0 answered of 8; 2 videos decoding, 3 requests waiting for an engine to start; "
        "7 MB of frames",
        "[10 s] 2 answered (1 failed) of 8; 6 tokens/s; 2.00 accepted per round; about 15 s left; "
        "2 videos decoding, 3 requests in the engine, 1 requests to run again, whose engine died, "
        "1 engines replaced; 7 MB of frames",
    ]


def test_no_time_left_is_shown_while_more_requests_may_come(
    monitor: RunMonitor, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    monitor.count_requests(Batches("ab", "c")).take()
    for request_id in "ab":
        monitor.record_row(row(request_id))
        clock.now += 6
        monitor.update(RunSnapshot())
    assert any(re.search(r"2 answered of 2 and more; .* tokens/s", m) for m in caplog.messages)
    assert "left;" not in caplog.text.replace("nothing left;", "")


def test_a_long_reading_of_the_input_is_shown(
    monitor: RunMonitor, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    source = monitor.count_requests(Batches("a", "b", "c"))
    while source.take() is not None:
        clock.now += 3
        monitor.show_reading()
    assert caplog.messages == ["[6 s] reading the input: 2 requests"]


def test_on_a_terminal_one_line_is_redrawn(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pipeline")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with RunMonitor(
        str(tmp_path), about={}, rows_written=lambda: 0, console=console, clock=clock
    ) as monitor:
        monitor.count_requests(Batches("ab")).take()
        for request_id in "ab":
            monitor.record_row(row(request_id))
            clock.now += 1
            monitor.update(RunSnapshot(in_engine=1))
    shown = screen.getvalue()
    assert "1 answered of 2" in shown
    assert "2 answered of 2" in shown
    assert "\r" in shown
    assert shown.count("\n") <= 2
    assert caplog.messages == []


def test_a_run_leaves_its_record_however_it_ends(tmp_path: Path, clock: Clock) -> None:
    def stopped() -> None:
        with RunMonitor(
            str(tmp_path), about={"model": "m"}, rows_written=lambda: 0, clock=clock
        ) as monitor:
            waves = [Wave((planned("a", 50), planned("b", 90)), 8), Wave((planned("c", 40),), 8)]
            for wave in waves:
                monitor.record_wave(wave)
            clock.now += 7
            monitor.record_row(row("b"))
            monitor.record_row(failed("z", "not_found"))
            monitor.update(RunSnapshot(decoding=1, waiting=2, frame_bytes=300))
            raise RunError("it ends")

    with pytest.raises(RunError):
        stopped()
    (run,) = read_runs(str(tmp_path))
    assert (run.outcome, run.seconds, run.about) == ("stopped", 7.0, {"model": "m"})
    assert run.waves == [
        WaveRecord(start=0.0, end=7.0, requests=2, min_context=50, max_context=90, engine_s=0.8),
        WaveRecord(start=0.0, end=0.0, requests=1, min_context=40, max_context=40, engine_s=0.0),
    ]
    assert run.samples[-1] == Sample(
        second=7.0,
        answered=2,
        failed=1,
        tokens=30,
        engine_s=0.8,
        decoding=1,
        decoded=2,
        frame_bytes=300,
    )


def test_no_record_where_nothing_was_done_or_storage_failed(tmp_path: Path) -> None:
    def without_storage() -> None:
        with RunMonitor(str(tmp_path), about={}, rows_written=lambda: 0) as monitor:
            monitor.record_row(row("a"))
            raise RequestError("storage_error", "the disk is full")

    with RunMonitor(str(tmp_path), about={}, rows_written=lambda: 0):
        pass
    with pytest.raises(RequestError):
        without_storage()
    assert not (tmp_path / "_runs").exists()
