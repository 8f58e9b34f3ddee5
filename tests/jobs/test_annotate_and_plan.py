from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import read
from pipeline.config import parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import main, run_job

ROWS = """clip,ask,split
videos/good-0.mp4,How many?,train
videos/good-1.mp4,What?,test
videos/good-0.mp4,Which?,test
videos/none.mp4,What?,test
videos/good-1.mp4,,train
"""


def test_questions_are_answered_and_their_columns_carried(
    tiny_model: Path, archive: Path, tmp_path: Path, ray_cluster: None
) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    words = [
        "--input",
        str(tmp_path / "rows.csv"),
        "--output",
        str(tmp_path / "out"),
        "--model",
        str(tiny_model),
    ]
    columns = ["--video-column", "clip", "--question-column", "ask", "--max-tokens", "8"]
    summary = run_job(parse_job([*words, *columns], "test"), "", survey=InProcessSurvey)
    assert (summary["requests"], summary["errors"], summary["videos_decoded"]) == (5, 2, 2)
    found = {
        (Path(row["clip"]).name, row["prompt"]): row
        for row in read(str(tmp_path / "out")).to_pylist()
    }
    assert found["good-0.mp4", "Which?"]["split"] == "test"
    good = (("good-0.mp4", "How many?"), ("good-0.mp4", "Which?"), ("good-1.mp4", "What?"))
    assert all(found[key]["text"] for key in good)
    assert found["none.mp4", "What?"]["error_code"] == "not_found"
    assert found["good-1.mp4", ""]["error_code"] == "invalid_request"


def test_a_plan_says_what_will_be_and_touches_nothing(
    tiny_model: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (archive / "empty.mp4").write_bytes(b"")
    words = ["--input", str(archive), "--model", str(tiny_model), "--prompt", "a", "--prompt", "b"]
    assert main(words, "plan.py", plan_only=True) == 0
    text = capsys.readouterr().out.splitlines()
    plan = json.loads(text[-1])
    assert (plan["requests"], plan["videos"], plan["errors"]) == (14, 7, 2)
    assert plan["failures"] == {"empty_file": 2}
    assert sum(plan["contexts"].values()) == sum(wave["requests"] for wave in plan["waves"]) == 12
    assert plan["hours"] == pytest.approx(24 / 3600, abs=1e-3)
    assert any("empty.mp4" in line for line in text[:-1])
    assert main([*words, "--output", str(tmp_path / "out"), "--dry-run"], "caption_archive.py") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == plan
    assert not (tmp_path / "out").exists()
