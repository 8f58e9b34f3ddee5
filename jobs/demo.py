#!/usr/bin/env python
"""Twelve H.264 clips become captions in Parquet, once drafted by attention and once, as a control,
at random.

    python jobs/demo.py                                  # or: make demo

Both texts are the full model's own; what differs is how many drafted tokens a round accepts.
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
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    ROOT,
    Job,
    draft_of,
)
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import guarded, run_job

SCENES = (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8)
SEED = 20_000  # of the first clip


@dataclass(frozen=True)
class Flags:
    """The demo's command line."""

    output: str = str(ROOT / "demo-output")
    model: str = "demo"
    max_tokens: int = 256


def main(argv: list[str]) -> int:
    """Writes the clips, runs the job twice, prints a table and a line of JSON."""
    flags: Flags = parse_flags(Flags, argv, Path(__file__).name)
    folder = Path(flags.output)
    for part in ("clips", "captions", "captions-random"):
        shutil.rmtree(folder / part, ignore_errors=True)
    stories = write_clips(folder / "clips")
    jobs = {
        draft: Job(
            input=str(folder / "clips"),
            output=str(folder / name),
            model=flags.model,
            draft=draft,
            max_tokens=flags.max_tokens,
        )
        for draft, name in (("std", "captions"), ("random", "captions-random"))
    }
    summaries = caption(list(jobs.values()))
    rows = sorted(read(jobs["std"].output).to_pylist(), key=lambda row: row["video_uri"])
    right, counted = show(rows, stories)
    used = draft_of(jobs["std"])
    assert used is not None
    print(f"\nThe captions lie in {jobs['std'].output}/part-*.parquet\n")
    print(json.dumps({
        "requests": summaries[0]["requests"], "errors": summaries[0]["errors"],
        "caption_clause_accuracy": round(right / counted, 4), "kv_keep": summaries[0]["kv_keep"], "gamma": used.gamma,
        "draft": "std", "accepted_per_round": summaries[0]["accepted_per_round"],
        "accepted_per_round_random": summaries[1]["accepted_per_round"], "output": jobs["std"].output,
    }), flush=True)  # fmt: skip
    return (
        0
        if summaries[0]["requests"] == len(SCENES)
        and not summaries[0]["errors"] + summaries[1]["errors"]
        else 1
    )


def write_clips(folder: Path) -> dict[str, tuple[world.Scene, ...]]:
    """A dozen MP4 files; file name → what is in it."""
    folder.mkdir(parents=True)
    stories = {}
    for number, scenes in enumerate(SCENES):
        name = f"clip-{number:02}.mp4"
        stories[name], file = world.make_clip(SEED + number, scenes)
        (folder / name).write_bytes(file)
    return stories


def caption(jobs: list[Job]) -> list[dict[str, Any]]:
    """Runs jobs one after another on one local cluster."""
    from pipeline.driver.cluster import cluster

    with cluster(jobs[0]):
        return [run_job(job, world.CAPTION_PROMPTS[0], InProcessSurvey) for job in jobs]


def show(
    rows: list[dict[str, Any]], stories: dict[str, tuple[world.Scene, ...]]
) -> tuple[int, int]:
    """Prints the table; returns right clauses and all of them."""
    table = Table("video", "caption", "right", "tokens", "accepted per round", show_lines=True)
    right = counted = 0
    for row in rows:
        name = Path(row["video_uri"]).name
        good, of = world.score_caption(stories[name], row["text"] or "")
        right = right + good
        counted = counted + of
        mark = f"[{'green' if good == of else 'red'}]{good} of {of}[/]"
        rate = row["accepted"] / row["rounds"] if row["rounds"] else 0.0
        table.add_row(
            name,
            row["text"] or row["error_message"],
            mark,
            str(row["num_generated_tokens"]),
            f"{rate:.2f}",
        )
    Console().print(table)
    return right, counted


if __name__ == "__main__":
    sys.exit(guarded(Path(__file__).name, lambda: main(sys.argv[1:])))
