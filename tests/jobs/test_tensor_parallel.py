"""A job whose engine is two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import job as job_module
from pipeline import read
from pipeline.config import parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import plan_job, run_job
from pipeline.records import CompletedRequest, UsageError


@pytest.fixture(scope="module")
def run(
    tiny_model: Path, shelf: Path, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    def start(*words: str) -> dict[str, str]:
        output = str(tmp_path_factory.mktemp("run") / "out")
        flags = [
            "--input",
            str(shelf),
            "--output",
            output,
            "--model",
            str(tiny_model),
            "--draft=specvlm",
        ]
        flags += ["--prompt=Describe this video.", "--max-tokens=20", "--max-num-seqs=1"]
        run_job(parse_job([*flags, *words], "test"), survey=InProcessSurvey)
        return {row["video_uri"]: row["text"] for row in read(output).to_pylist()}

    return start


@pytest.fixture(scope="module")
def of_one(run: Any) -> dict[str, str]:
    """What an engine of one process writes."""
    return run()


def engines() -> list[psutil.Process]:
    """Engine actors that descend from this process and run."""
    found = [
        p
        for p in psutil.Process().children(recursive=True)
        if p.name().startswith("ray::EngineAct")
    ]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("which", [0, 1])
def test_two_ranks_write_what_one_does_and_when_one_dies_another_engine_takes_the_place_of_both(
    run: Any, of_one: dict[str, str], monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    killed: list[psutil.Process] = []
    completed = job_module._Recorder.completed

    def kill_one(self: Any, request: CompletedRequest) -> None:
        if not killed:
            killed.append(engines()[which])
            killed[0].kill()
        completed(self, request)

    monkeypatch.setattr(job_module._Recorder, "completed", kill_one)
    texts = run("--tensor-parallel-size=2")
    assert killed and len(of_one) == 6 and all(of_one.values())
    assert texts == of_one
    psutil.wait_procs(engines(), timeout=60)
    assert not engines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--tensor-parallel-size=4"],
            "--tensor-parallel-size is 4: the model's 2 KV heads and 6 query heads",
        ),
        (["--tensor-parallel-size=0"], "--tensor-parallel-size is 0: at least 1"),
        (["--tensor-parallel-size=2", "--pipeline-parallel-size=2"], "cannot be combined"),
        (["--tensor-parallel-size=3", "--strict=9"], "--strict allows 2 at most"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tiny_model: Path, archive: Path, words: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan_job(
            parse_job(["--input", str(archive), "--model", str(tiny_model), *words], "test"),
            "Describe this.",
        )
