#!/usr/bin/env python
"""Caption a dozen H.264 clips, once with the draft `std` and once, as a control, with `random`.

    python jobs/demo.py     # or: make demo

Both runs write the full model's text; they differ in how many drafted tokens a round accepts.
Standard output ends with one JSON object.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from jobs.demo_model import world
from pipeline import read
from pipeline.command_line import flag, parse_flags
from pipeline.config import ROOT, Job, draft_of
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import run_guarded, run_job

SCENES = (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8)  # of each clip
FIRST_SEED = 20_000  # of the clips: clip n has seed FIRST_SEED + n
FOLDERS = {"std": "captions", "random": "captions-random"}  # by draft

Story = tuple[world.Scene, ...]


@dataclass(frozen=True)
class Flags:
    """The command line."""

    output: str = flag(str(ROOT / "demo-output"), "folder for the clips and the captions")
    model: str = flag("demo", "preset of conf/model, hub id, or folder")
    max_tokens: int = flag(256, "generated tokens per caption, at most")


def main(argv: list[str]) -> int:
    """Write the clips, caption them with both drafts, print a table and one JSON object."""
    flags = parse_flags(Flags, argv, Path(__file__).name, description=__doc__ or "")
    folder = Path(flags.output)
    for name in ("clips", *FOLDERS.values()):
        shutil.rmtree(folder / name, ignore_errors=True)
    stories = write_clips(folder / "clips")
    jobs = {draft: _job(flags, draft) for draft in FOLDERS}
    summaries = run_jobs(jobs)
    rows = sorted(read(jobs["std"].output).to_pylist(), key=lambda row: row["video_uri"])
    accuracy = print_table(rows, stories)
    print(f"\nThe captions are in {jobs['std'].output}/part-*.parquet\n")
    draft = draft_of(jobs["std"])
    assert draft is not None
    figures = {
        "requests": summaries["std"]["requests"],
        "errors": summaries["std"]["errors"],
        "caption_clause_accuracy": round(accuracy, 4),
        "kv_keep": summaries["std"]["kv_keep"],
        "gamma": draft.gamma,
        "draft": "std",
        "accepted_per_round": summaries["std"]["accepted_per_round"],
        "accepted_per_round_random": summaries["random"]["accepted_per_round"],
        "output": jobs["std"].output,
    }
    print(json.dumps(figures), flush=True)
    errors = sum(summary["errors"] for summary in summaries.values())
    return 0 if figures["requests"] == len(SCENES) and not errors else 1


def _job(flags: Flags, draft: str) -> Job:
    folder = Path(flags.output)
    return Job(
        input=str(folder / "clips"),
        output=str(folder / FOLDERS[draft]),
        model=flags.model,
        draft=draft,
        max_tokens=flags.max_tokens,
    )


def write_clips(folder: Path) -> dict[str, Story]:
    """Write a dozen MP4 files; returns the scenes of each file name."""
    folder.mkdir(parents=True)
    stories = {}
    for number, scenes in enumerate(SCENES):
        name = f"clip-{number:02}.mp4"
        stories[name], content = world.make_clip(FIRST_SEED + number, scenes)
        (folder / name).write_bytes(content)
    return stories


def run_jobs(jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    """Run the jobs one after another on one local Ray cluster; returns their summaries."""
    from pipeline.driver.cluster import cluster  # starts Ray

    prompt = world.CAPTION_PROMPTS[0]
    with cluster(next(iter(jobs.values()))):
        return {draft: run_job(job, prompt, InProcessSurvey) for draft, job in jobs.items()}


def print_table(rows: list[dict[str, Any]], stories: dict[str, Story]) -> float:
    """Print the captions beside the truth; returns the fraction of their clauses that are right."""
    table = Table("video", "caption", "right", "tokens", "accepted per round", show_lines=True)
    right = 0
    clauses = 0
    for row in rows:
        name = Path(row["video_uri"]).name
        row_right, row_clauses = world.score_caption(stories[name], row["text"] or "")
        right += row_right
        clauses += row_clauses
        colour = "green" if row_right == row_clauses else "red"
        accepted = row["accepted"] / row["rounds"] if row["rounds"] else 0.0
        table.add_row(
            name,
            row["text"] or row["error_message"],
            f"[{colour}]{row_right} of {row_clauses}[/]",
            str(row["num_generated_tokens"]),
            f"{accepted:.2f}",
        )
    Console().print(table)
    return right / clauses


if __name__ == "__main__":
    sys.exit(run_guarded(Path(__file__).name, lambda: main(sys.argv[1:])))
