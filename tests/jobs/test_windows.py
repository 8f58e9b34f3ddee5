"""A job over windows of long videos, from the command line's words to the rows."""

from __future__ import annotations

from pathlib import Path

from jobs.demo_model import world
from pipeline import read
from pipeline.config import parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import run_job


def test_every_window_gets_its_row(tiny_model: Path, ray_cluster: None, tmp_path: Path) -> None:
    """Six scenes of 2 s in windows of 4 s; all windows of a file in one pass, and a second run has
    nothing to do."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "long.mp4").write_bytes(world.make_clip(1, 6)[1])
    (tmp_path / "in" / "empty.mp4").write_bytes(b"")
    output = str(tmp_path / "out")
    flags = [
        "--input",
        str(tmp_path / "in"),
        "--output",
        output,
        "--model",
        str(tiny_model),
        "--max-tokens",
        "4",
    ]
    flags += [
        "--window-seconds",
        "4",
        "--prompt",
        "Describe this video.",
        "--prompt",
        "How many scenes are there?",
    ]
    job = parse_job(flags, "test")
    summary = run_job(job, survey=InProcessSurvey)
    rows = read(output).to_pylist()
    assert (summary["requests"], summary["errors"], summary["videos_decoded"]) == (8, 2, 1)
    good = [row for row in rows if row["status"] != "error"]
    parts = sorted((row["video_start"], row["video_end"]) for row in good)
    assert parts == 2 * [(0.0, 4.0)] + 2 * [(4.0, 8.0)] + 2 * [(8.0, 12.0)]
    for row in good:
        assert row["frames_lost"] == 0 and row["num_visual_tokens"] == row["planned_visual_tokens"]
        assert all(row["video_start"] <= at < row["video_end"] for at in row["frame_pts"])
    again = run_job(job, survey=InProcessSurvey)
    assert (again["requests"], again["new"], again["videos_decoded"]) == (8, 0, 0)
