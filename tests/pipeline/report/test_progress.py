from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.records import (
    FramePlan,
    InputRow,
    PlannedRequest,
    RequestError,
    RunError,
    RunSnapshot,
    VideoInfo,
    Wave,
)
from pipeline.report.monitor import (
    RunMonitor,
    duration,
    number,
)
from pipeline.report.runs import SAMPLES, WAVES, RunRecorder, read_runs
from pipeline.report.tally import (
    Tally,
)

INFO = VideoInfo(
    "v.mp4",
    size_bytes=1,
    version="1",
    container="mp4",
    codec="h264",
    duration=1.0,
    start=0.0,
    frames=8,
    exact=True,
    fps=8.0,
    height=64,
    width=64,
    rotation=0,
)
PLAN = FramePlan((0.0,), height=64, width=64, fps=1.0, tokens=16)


def planned(name: str, context: int = 100) -> PlannedRequest:
    return PlannedRequest(
        name, input_row=InputRow("v.mp4", "what?"), info=INFO, frame_plan=PLAN, context=context
    )


def row(name: str, **values: Any) -> dict[str, Any]:
    told = {
        "status": "success",
        "error_code": None,
        "num_generated_tokens": 30,
        "rounds": 10,
        "proposed": 50,
    }
    times = {"accepted": 20, "vision_s": 0.1, "prefill_s": 0.2, "decode_s": 0.5}
    return {"request_id": name, **told, **times, **values}


def failed(name: str, code: str) -> dict[str, Any]:
    return {"request_id": name, "status": "error", "error_code": code, "error_message": "it failed"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """A source of batches that are all there."""

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
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def monitor(tmp_path: Path, clock: Clock, log: io.StringIO) -> Iterator[RunMonitor]:
    with RunMonitor(
        str(tmp_path),
        about={"model": "demo"},
        written=lambda: 0,
        console=Console(file=log),
        clock=clock,
    ) as made:
        yield made


def test_a_tally_is_the_sum_of_its_rows() -> None:
    tally = Tally()
    for one in (
        row("a"),
        row("b", status="truncated"),
        failed("c", "empty_file"),
        failed("d", "empty_file"),
    ):
        tally.add(one)
    assert (tally.done, tally.failed, tally.answered) == (2, {"empty_file": 2}, 4)
    assert (tally.tokens, tally.rounds, tally.proposed, tally.accepted) == (60, 20, 100, 40)
    assert tally.engine_s == pytest.approx(1.6)


def test_lines_in_a_log_say_what_is_done_and_how_long_the_rest_takes(
    monitor: RunMonitor, clock: Clock, log: io.StringIO
) -> None:
    found = monitor.count_requests(Batches("abc", "defgh"))
    assert [found.take(), found.take(), found.take()] == ["abc", "defgh", None]
    clock.now += 5
    monitor.update(RunSnapshot(decoding=2, waiting=3, engines=0, starting=1, frame_bytes=7_000_000))
    monitor.record_row(failed("a", "not_a_video"))
    monitor.record_row(row("b"))
    clock.now += 1
    monitor.update(RunSnapshot())  # too early for another line
    clock.now += 4
    monitor.update(
        RunSnapshot(decoding=2, in_engine=3, suspects=1, deaths=1, frame_bytes=7_000_000)
    )
    assert log.getvalue().splitlines() == [
        "[5 s] 0 answered of 8; 2 videos decoding, 3 requests waiting for an engine to start; 7 MB of frames",
        "[10 s] 2 answered (1 failed) of 8; 6 tokens/s; 2.00 accepted per round; about 15 s left; "
        "2 videos decoding, 3 requests in the engine, 1 requests to run again, whose engine died, 1 engines replaced; "
        "7 MB of frames",
    ]


def test_no_time_is_promised_while_more_requests_may_come(
    monitor: RunMonitor, clock: Clock, log: io.StringIO
) -> None:
    monitor.count_requests(Batches("ab", "c")).take()
    for name in "ab":
        monitor.record_row(row(name))
        clock.now += 6
        monitor.update(RunSnapshot())
    assert re.search(r"2 answered of 2 and more; .* tokens/s", log.getvalue())
    assert "left;" not in log.getvalue().replace("nothing left;", "")


def test_a_long_reading_of_the_input_is_told(
    monitor: RunMonitor, clock: Clock, log: io.StringIO
) -> None:
    found = monitor.count_requests(Batches("a", "b", "c"))
    while found.take() is not None:
        clock.now += 3
        monitor.show_reading()
    assert log.getvalue().splitlines() == ["[6 s] reading the input: 2 requests"]


def test_on_a_terminal_one_line_changes(tmp_path: Path, clock: Clock) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with RunMonitor(
        str(tmp_path), about={}, written=lambda: 0, console=console, clock=clock
    ) as monitor:
        monitor.count_requests(Batches("ab")).take()
        for name in "ab":
            monitor.record_row(row(name))
            clock.now += 1
            monitor.update(RunSnapshot(in_engine=1))
    shown = screen.getvalue()
    assert "1 answered of 2" in shown and "2 answered of 2" in shown
    assert "\r" in shown and shown.count("\n") <= 2


def test_a_run_leaves_its_record_however_it_ends(tmp_path: Path, clock: Clock) -> None:
    def stopped() -> None:
        with RunMonitor(
            str(tmp_path), about={"model": "m"}, written=lambda: 0, console=_quiet(), clock=clock
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
    assert run.waves == [[0.0, 7.0, 2, 50, 90, 0.8], [0.0, 0.0, 1, 40, 40, 0.0]]
    assert run.samples[-1] == [7.0, 2, 1, 30, 0.8, 1, 2, 300]


def test_no_record_where_nothing_was_done_or_storage_is_what_failed(tmp_path: Path) -> None:
    def without_storage() -> None:
        with RunMonitor(str(tmp_path), {}, lambda: 0, _quiet()) as monitor:
            monitor.record_row(row("a"))
            raise RequestError("storage_error", "the disk is full")

    with RunMonitor(str(tmp_path), {}, lambda: 0, _quiet()):
        pass
    with pytest.raises(RequestError):
        without_storage()
    assert not (tmp_path / "_runs").exists()


def test_a_record_stays_small_and_its_sums_right(tmp_path: Path) -> None:
    log = RunRecorder(str(tmp_path), {})
    tally = Tally()
    for number_ in range(5000):
        log.record_wave(Wave((planned(f"{number_}", 1 + number_),), 8), float(number_))
        log.answered(row(f"{number_}"), number_ + 0.5)
        tally.add(row("x"))
        log.sample(float(number_), tally, RunSnapshot())
    log.sample(5000.0, tally, RunSnapshot(), last=True)
    log.save("finished", 5000.0)
    (file,) = (tmp_path / "_runs").iterdir()
    (run,) = read_runs(str(tmp_path))
    assert file.stat().st_size < 60_000
    assert len(run.samples) <= SAMPLES + 1 and len(run.waves) <= WAVES
    assert sum(wave[2] for wave in run.waves) == 5000
    assert sum(wave[5] for wave in run.waves) == pytest.approx(5000 * 0.8)
    assert run.waves[0][3] == 1 and run.waves[-1][1:2] + run.waves[-1][4:5] == [4999.5, 5000]
    assert all(wave[2] == run.merged for wave in run.waves[:-1])
    assert run.samples[-1][:2] == [5000.0, 5000]


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "_runs").mkdir()
    for name, content in {
        "a.json": b"",
        "b.json": b"[1]",
        "c.json": b'{"format": 9}',
        "d.txt": b"x",
    }.items():
        (tmp_path / "_runs" / name).write_bytes(content)
    assert read_runs(str(tmp_path)) == []
    assert read_runs(str(tmp_path / "nowhere")) == []


def test_records_are_plain_json(tmp_path: Path) -> None:
    RunRecorder(str(tmp_path), {"engines": 1}).save("running", 0.0)
    (file,) = (tmp_path / "_runs").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}\.json", file.name)
    assert json.loads(file.read_text())["outcome"] == "running"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89, "89 s"), (600, "10 min"), (7140, "119 min"), (12_000, "3 h 20 min")],
)
def test_durations_are_said_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_numbers_have_three_digits_or_all() -> None:
    assert [number(v) for v in (0.01234, 1.5, 43.51, 123.4, 12345.6)] == [
        "0.0123",
        "1.5",
        "43.5",
        "123",
        "12,346",
    ]


def _quiet() -> Console:
    return Console(file=io.StringIO())
