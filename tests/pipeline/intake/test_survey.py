"""A survey in a process of its own finds what one in this process finds, and ends with its
driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jobs.demo_model import world
from pipeline.config import ROOT, Job
from pipeline.intake.prefetch import Source
from pipeline.intake.survey import SubprocessSurvey, Survey
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.records import (
    FailedRequest,
    ProbedRequest,
    RunError,
    UsageError,
)
from pipeline.video import isolated_probe

PROMPTS = ("What?", "How many?")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """Two clips, and a file that is none."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.mp4").write_bytes(world.make_clip(number, 1)[1])
    (folder / "2.mp4").write_text("no video")
    return Job(input=str(folder), model=str(tiny_model))


def drain(found: Source[list[ProbedRequest]]) -> list[ProbedRequest]:
    every: list[ProbedRequest] = []
    while not found.closed:
        every += found.take(1.0) or []
    return every


def ids(every: Iterable[ProbedRequest]) -> list[str]:
    return [one.request_id for one in every]


def test_two_processes_find_what_one_does(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a place where a folder of the user's has the name of this package."""
    place = Path(job.input).parent
    (place / "pipeline").mkdir()
    (place / "pipeline" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(place)
    job = replace(job, input="videos")

    def survey(surveyor: Survey, done: frozenset[bytes] = frozenset()) -> tuple[object, ...]:
        with surveyor:
            every = drain(surveyor.start(done, done))
            failures = [
                (f.error.code, f.error.message) for f in every if isinstance(f, FailedRequest)
            ]
            planned = [one for one in every if not isinstance(one, FailedRequest)]
            return surveyor.facts, ids(every), failures, planned, surveyor.totals

    alone = survey(InProcessSurvey(job, PROMPTS))
    apart = survey(SubprocessSurvey(job, PROMPTS))
    assert apart == alone
    assert (
        len(alone[1]) == 6
        and len(alone[2]) == 2
        and (apart[-1].requests, apart[-1].failed) == (6, 0)
    )
    some = frozenset(map(bytes.fromhex, alone[1][:3]))
    again = survey(
        InProcessSurvey(job, PROMPTS), some
    )  # that another process is told what is done, the next but one shows
    assert again[1] == alone[1][3:] and (again[-1].requests, again[-1].failed) == (6, 3)


def test_what_is_wrong_is_raised_where_it_is_asked_for(job: Job, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_bytes(b"a.mp4\n" * 30_000 + b"\xff.mp4\n")
    with SubprocessSurvey(Job(input=str(listed), model=job.model), PROMPTS) as survey:
        assert survey.facts.input_schema.names == []
        found = survey.start(frozenset(), frozenset())
        with pytest.raises(UsageError, match=r"list.txt cannot be read"):
            drain(found)


def test_a_survey_that_is_killed_is_gone_on_with_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """After a part of the input was handed on; the second time there is nothing to blame."""
    with InProcessSurvey(job, PROMPTS) as here:
        whole = ids(drain(here.start(frozenset(), frozenset())))
    row = {bytes.fromhex(whole[1])}
    with SubprocessSurvey(job, PROMPTS) as survey:
        found = survey.start(row, row)
        survey._handed_on += bytes.fromhex(whole[0])
        survey._process.send_signal(signal.SIGSEGV)
        assert sorted(ids(drain(found))) == sorted(whole[2:])
        assert (survey.totals.requests, survey.totals.failed) == (6, 1)
        assert "was ended by SIGSEGV: each file apart from now on" in caplog.text
        survey._process.wait()
        survey._closing = None  # as if there were more
        with pytest.raises(
            RunError, match=r"reads the input was ended with exit status 0; .*resumes"
        ):
            drain(found)


STAND_IN = """
import os, signal

def check_headers(job, buffer):
    if open(job.source, "rb").read() == b"kill":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_only_the_file_that_ends_processes_is_blamed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carefully, a probe that kills its process is a row; the others are as ever."""
    (Path(job.input) / "3.mp4").write_bytes(b"kill")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(isolated_probe, "HEADER_CHECK", "stand_in:check_headers")
    with InProcessSurvey(job, PROMPTS, isolated_probe.probe_all) as survey:
        every = drain(survey.start(frozenset(), frozenset()))
    errors = {
        Path(f.pending.input_row.video_uri).name: f.error
        for f in every
        if isinstance(f, FailedRequest)
    }
    assert {name: error.code for name, error in errors.items()} == {
        "2.mp4": "not_a_video",
        "3.mp4": "decode_crashed",
    }
    assert "3.mp4: its headers cannot be read: it crashed (SIGSEGV)" in errors["3.mp4"].message
    assert len(every) == 8


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
    words = [sys.executable, "-c", DRIVER, job.input, job.model]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as driver:
        assert driver.stdout is not None
        survey = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
        survey.wait(timeout=60)
