from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.records import RunSnapshot, Wave
from pipeline.report.runs import (
    MAX_SAMPLES,
    MAX_WAVES,
    RunRecorder,
    Sample,
    WaveRecord,
    latest_job,
    read_runs,
)
from pipeline.report.tally import Tally
from tests.pipeline.report.stub_data import START, run_of
from tests.pipeline.report.stub_events import failed, planned, row


def test_a_record_stays_small_and_its_sums_right(tmp_path: Path) -> None:
    recorder = RunRecorder(str(tmp_path), {})
    tally = Tally()
    for second in range(5000):
        recorder.record_wave(Wave((planned(f"{second}", 1 + second),), 8), float(second))
        recorder.record_row(row(f"{second}"), second + 0.5)
        tally.add(row("x"))
        recorder.add_sample(float(second), tally, RunSnapshot())
    recorder.add_sample(5000.0, tally, RunSnapshot(), force=True)
    recorder.save("finished", 5000.0)
    (file,) = (tmp_path / "_runs").iterdir()
    (run,) = read_runs(str(tmp_path))
    assert file.stat().st_size < 60_000
    assert len(run.samples) <= MAX_SAMPLES + 1
    assert len(run.waves) <= MAX_WAVES
    assert sum(wave.requests for wave in run.waves) == 5000
    assert sum(wave.engine_s for wave in run.waves) == pytest.approx(5000 * 0.8)
    assert run.waves[0].min_context == 1
    assert (run.waves[-1].end, run.waves[-1].max_context) == (4999.5, 5000)
    assert all(wave.requests == run.merged for wave in run.waves[:-1])
    assert (run.samples[-1].second, run.samples[-1].answered) == (5000.0, 5000)


def test_files_that_are_no_record_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "_runs").mkdir()
    for name, content in {
        "a.json": b"",
        "b.json": b"[1]",
        "c.json": b'{"format": 9}',
        "d.json": b'{"format": 1}',
        "e.json": b'{"format": 1, "samples": [[1]]}',
        "f.txt": b"x",
    }.items():
        (tmp_path / "_runs" / name).write_bytes(content)
    assert read_runs(str(tmp_path)) == []
    assert read_runs(str(tmp_path / "nowhere")) == []


def test_records_are_plain_json(tmp_path: Path) -> None:
    RunRecorder(str(tmp_path), {"engines": 1}).save("running", 0.0)
    (file,) = (tmp_path / "_runs").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}\.json", file.name)
    assert json.loads(file.read_text())["outcome"] == "running"


# A record as it stands on disk; outputs with such records exist.
STORED = {
    "format": 1,
    "began": 1_796_000_000.5,
    "seconds": 7.0,
    "outcome": "stopped",
    "about": {"model": "demo", "engines": 1},
    "samples": [[7.0, 2, 1, 30, 0.8, 1, 2, 300]],
    "merged": 1,
    "waves": [[0.0, 7.0, 2, 50, 90, 0.8]],
}


def test_stored_records_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "_runs").mkdir()
    (tmp_path / "_runs" / "20261130T000000Z-00000000.json").write_text(json.dumps(STORED))
    (run,) = read_runs(str(tmp_path))
    assert (run.start_time, run.end_time, run.outcome) == (START + 0.5, START + 7.5, "stopped")
    assert run.samples == [
        Sample(
            second=7.0,
            answered=2,
            failed=1,
            tokens=30,
            engine_s=0.8,
            decoding=1,
            decoded=2,
            frame_bytes=300,
        )
    ]
    assert run.waves == [
        WaveRecord(start=0.0, end=7.0, requests=2, min_context=50, max_context=90, engine_s=0.8)
    ]


def test_the_stored_format_does_not_change(tmp_path: Path) -> None:
    recorder = RunRecorder(str(tmp_path), {"model": "demo", "engines": 1}, 1_796_000_000.5)
    recorder.record_wave(Wave((planned("a", 50), planned("b", 90)), 8), 0.0)
    tally = Tally()
    for answered in (row("b"), failed("z", "not_found")):
        tally.add(answered)
        recorder.record_row(answered, 7.0)
    recorder.add_sample(7.0, tally, RunSnapshot(decoding=1, waiting=2, frame_bytes=300))
    recorder.save("stopped", 7.0)
    (file,) = (tmp_path / "_runs").iterdir()
    assert json.loads(file.read_text()) == STORED


def test_the_latest_job_includes_the_runs_that_it_resumed() -> None:
    runs = [run_of(600, START + start) for start in (0, 86_400, 86_400 + 1200, 86_400 + 5000)]
    assert latest_job(runs) == runs[1:]
    assert latest_job(runs[:1]) == runs[:1]
    assert latest_job([]) == []
