from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import read
from pipeline.config import ROOT, parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import run_job
from pipeline.report.runs import read_runs

SCRIPT = ROOT / "jobs" / "report.py"


def run_report(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `jobs/report.py` with these words as its command line."""
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)


def test_a_run_into_a_bucket_and_its_report(
    tiny_model: Path,
    ray_cluster: None,
    archive: Path,
    s3: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pipeline")
    (archive / "<script>alert(1)<script>.mp4").write_text("this is no video\n" * 100)
    words = [
        "--input",
        str(archive),
        "--output",
        f"{s3.bucket}/out",
        "--model",
        str(tiny_model),
        "--draft",
        "std",
        "--max-tokens",
        "8",
    ]
    summary = run_job(parse_job(words, "test"), "Describe this video.", survey=InProcessSurvey)
    progress = [
        record.getMessage()
        for record in caplog.records
        if record.name == "pipeline.report.progress"
    ][-1]
    assert "7 answered (1 failed) of 7" in progress
    assert progress.endswith("nothing left; 0 MB of frames")
    (run,) = read_runs(f"{s3.bucket}/out")
    assert (run.outcome, run.about["engines"], run.about["draft"]) == ("finished", 1, "std")
    last = run.samples[-1]
    assert (last.answered, last.failed, last.tokens) == (7, 1, summary["tokens"])
    rows = read(f"{s3.bucket}/out").to_pylist()
    contexts = [
        r["num_prompt_tokens"] + r["num_visual_tokens"] for r in rows if r["status"] != "error"
    ]
    (wave,) = run.waves
    assert wave.requests == 6
    assert (wave.min_context, wave.max_context) == (min(contexts), max(contexts))
    done = run_report("--output", f"{s3.bucket}/out", "--price-per-hour", "3.5")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"report": f"{s3.bucket}/out/_report.html", "rows": 7, "errors": 1}
    assert done.stderr.startswith("6 of 7 requests answered in ")
    key = {"Bucket": s3.bucket.removeprefix("s3://"), "Key": "out/_report.html"}
    page = s3.client().get_object(**key)["Body"].read().decode()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;script&gt;.mp4" in page
    # all plots but the speed-up: no row was decoded densely
    assert page.count("<svg") == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--output is missing"),
        (["--output", "{folder}/nowhere"], "nowhere"),
        (["--output", "{folder}", "--price-per-hour", "-1"], "--price-per-hour"),
        (["--output", "{folder}", "--prise-per-hour", "1"], "--price-per-hour"),
    ],
)
def test_a_usage_error_is_one_sentence_on_standard_error(
    words: list[str], named: str, tmp_path: Path
) -> None:
    done = run_report(*(word.format(folder=tmp_path) for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("report.py: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
