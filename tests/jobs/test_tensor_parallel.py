"""A job whose engine is two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import job as job_module
from pipeline import read
from pipeline.config import parse_job
from pipeline.job import plan_job, run_job
from pipeline.surveying import Here
from pipeline.types import Answer, UsageError


@pytest.fixture
def run(tiny_model: Path, archive: Path, tmp_path: Path, ray_cluster: None) -> Any:
    def start(name: str, *words: str) -> dict[str, str]:
        flags = ["--input", str(archive), "--output", str(tmp_path / name), "--model", str(tiny_model)]
        run_job(parse_job([*flags, "--max-tokens", "8", *words], "test"), survey=Here)
        return {row["video_uri"]: row["text"] for row in read(str(tmp_path / name)).to_pylist()}

    return start


def engines() -> list[psutil.Process]:
    """Engine actors that descend from this process and run."""
    found = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::EngineAct")]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def test_two_ranks_write_what_one_does(run: Any) -> None:
    one = run("one", "--max-num-seqs=2", "--prompt=Describe this video.", "--draft=specvlm")
    two = run("two", "--max-num-seqs=2", "--prompt=Describe this video.", "--draft=specvlm", "--tensor-parallel-size=2")
    assert len(one) == 6 and all(one.values())
    assert two == one


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_rank_dies_another_engine_takes_the_place_of_both(
    run: Any, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    killed: list[psutil.Process] = []
    answered = job_module._Recorder.answered

    def kill_one(self: Any, answer: Answer) -> None:
        if not killed:
            killed.append(engines()[which])
            killed[0].kill()
        answered(self, answer)

    monkeypatch.setattr(job_module._Recorder, "answered", kill_one)
    texts = run("out", "--tensor-parallel-size=2", "--max-num-seqs=1", "--max-tokens=20")
    assert killed and len(texts) == 6 and all(texts.values())
    psutil.wait_procs(engines(), timeout=60)
    assert not engines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel-size=4"], "--tensor-parallel-size is 4: the model's 2 KV heads and 6 query heads"),
        (["--tensor-parallel-size=0"], "--tensor-parallel-size is 0: at least 1"),
        (["--tensor-parallel-size=2", "--pipeline-parallel-size=2"], "do not go together"),
        (["--tensor-parallel-size=3", "--strict=9"], "--strict goes with 2 at most"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tiny_model: Path, archive: Path, words: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan_job(parse_job(["--input", str(archive), "--model", str(tiny_model), *words], "test"), "Describe this.")
