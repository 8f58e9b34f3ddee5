"""A survey in a subprocess gives the same results as one in this process, and ends with its
driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from jobs.demo_model import world
from pipeline.config import ROOT, Job
from pipeline.intake.prefetch import Source
from pipeline.intake.survey import InputTotals, JobFacts, SubprocessSurvey, Survey
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.records import FailedRequest, ProbedRequest, RunError, UsageError
from pipeline.video import isolated_probe

PROMPTS = ("What?", "How many?")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """Two clips, and a file that is no video."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.mp4").write_bytes(world.make_clip(number, 1)[1])
    (folder / "2.mp4").write_text("no video")
    return Job(input=str(folder), model=str(tiny_model))


def drain(batches: Source[list[ProbedRequest]]) -> list[ProbedRequest]:
    requests: list[ProbedRequest] = []
    while not batches.closed:
        requests += batches.take(1.0) or []
    return requests


def ids(requests: Iterable[ProbedRequest]) -> list[str]:
    return [request.request_id for request in requests]


class Result(NamedTuple):
    facts: JobFacts
    requests: list[ProbedRequest]
    totals: InputTotals

    @property
    def comparable(self) -> tuple[object, ...]:
        """Everything, with errors as values, since exceptions compare by identity."""
        failed = [r for r in self.requests if isinstance(r, FailedRequest)]
        planned = [r for r in self.requests if not isinstance(r, FailedRequest)]
        errors = [(r.error.code, r.error.message) for r in failed]
        return self.facts, ids(self.requests), errors, planned, self.totals


def run(survey: Survey, done: frozenset[bytes] = frozenset()) -> Result:
    with survey:
        requests = drain(survey.start(done, done))
        return Result(survey.facts, requests, survey.totals)


def test_a_subprocess_survey_equals_an_in_process_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in a working directory that has a folder named like this package."""
    folder = Path(job.input).parent
    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(folder)
    job = replace(job, input="videos")

    in_process = run(InProcessSurvey(job, PROMPTS))
    subprocessed = run(SubprocessSurvey(job, PROMPTS))
    assert subprocessed.comparable == in_process.comparable
    assert len(in_process.requests) == 6
    assert sum(isinstance(r, FailedRequest) for r in in_process.requests) == 2
    assert in_process.totals == InputTotals(6, 0)

    all_ids = ids(in_process.requests)
    done = frozenset(map(bytes.fromhex, all_ids[:3]))
    # that `done` reaches a subprocess is covered by the test of a killed survey
    rest = run(InProcessSurvey(job, PROMPTS), done)
    assert ids(rest.requests) == all_ids[3:]
    assert rest.totals == InputTotals(6, 3)


def test_an_error_late_in_the_manifest_is_raised_where_batches_are_taken(
    job: Job, tmp_path: Path
) -> None:
    listed = tmp_path / "list.txt"
    listed.write_bytes(b"a.mp4\n" * 30_000 + b"\xff.mp4\n")
    with SubprocessSurvey(Job(input=str(listed), model=job.model), PROMPTS) as survey:
        assert survey.facts.input_schema.names == []
        batches = survey.start(frozenset(), frozenset())
        with pytest.raises(UsageError, match=r"list.txt cannot be read"):
            drain(batches)


def test_a_killed_survey_is_restarted_once_and_continues(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It was killed after one request was delivered. The second process ends without a signal,
    which no video can be the reason for."""
    with InProcessSurvey(job, PROMPTS) as survey:
        all_ids = ids(drain(survey.start(frozenset(), frozenset())))
    done = {bytes.fromhex(all_ids[1])}
    with SubprocessSurvey(job, PROMPTS) as survey:
        batches = survey.start(done, done)
        survey._delivered_ids += bytes.fromhex(all_ids[0])
        survey._process.send_signal(signal.SIGSEGV)
        assert sorted(ids(drain(batches))) == sorted(all_ids[2:])
        assert survey.totals == InputTotals(6, 1)
        assert "was ended by SIGSEGV: each video's headers are now read in a process" in caplog.text
        survey._process.wait()
        survey._totals = None  # as if there were more batches
        with pytest.raises(
            RunError, match=r"reads the input was ended with exit status 0; .*resumes"
        ):
            drain(batches)


STAND_IN = """
import os, signal

def check_headers(job, buffer):
    if open(job.source, "rb").read() == b"kill":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_with_isolated_probes_only_the_video_that_crashes_the_probe_fails(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(job.input) / "3.mp4").write_bytes(b"kill")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(isolated_probe, "HEADER_CHECK", "stand_in:check_headers")
    result = run(InProcessSurvey(job, PROMPTS, isolated_probe.probe_all))
    errors = {
        Path(r.pending.input_row.video_uri).name: r.error
        for r in result.requests
        if isinstance(r, FailedRequest)
    }
    assert {name: error.code for name, error in errors.items()} == {
        "2.mp4": "not_a_video",
        "3.mp4": "decode_crashed",
    }
    assert "3.mp4: its headers cannot be read: it crashed (SIGSEGV)" in errors["3.mp4"].message
    assert len(result.requests) == 8


DRIVER = """
import sys, time
from pipeline.config import Job
from pipeline.intake.survey import SubprocessSurvey

survey = SubprocessSurvey(Job(input=sys.argv[1], model=sys.argv[2]), ("?",))
survey.facts
print(survey._process.pid, flush=True)
time.sleep(600)
"""


def test_a_survey_does_not_outlive_its_driver(job: Job) -> None:
    command = [sys.executable, "-c", DRIVER, job.input, job.model]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as driver:
        assert driver.stdout is not None
        survey = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
        survey.wait(timeout=60)
