#!/usr/bin/env python
"""Measures what the device at hand does with a model, and writes it as one JSON file for
`--profile`.

    python jobs/calibrate.py --model demo --output profile.json

Times dense steps, verifications and draft steps of each draft over a small grid of rows and
contexts, prefill, vision, selection, and how often drafted tokens are accepted. Takes minutes.
Standard output ends with one JSON object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from pipeline.command_line import (
    parse_flags,
)
from pipeline.job import guarded
from pipeline.plan.profile_file import write_profile
from pipeline.records import UsageError


@dataclass(frozen=True)
class Flags:
    """The command line."""

    model: str = field(default="demo", metadata={"help": "preset of conf/model, hub id, or folder"})
    output: str = field(default="", metadata={"help": "where the profile is written"})
    device: str = field(
        default="", metadata={"help": "cpu or cuda; default: cuda where there is one"}
    )
    dtype: str = field(
        default="float32", metadata={"help": "of weights and cache, as jobs have it"}
    )
    contexts: str = field(default="512,2048,8192", metadata={"help": "tokens, of the grid"})
    rows: str = field(default="1,8", metadata={"help": "slots, of the grid"})
    drafts: str = field(
        default="std,int8,int4,ngram", metadata={"help": "presets of conf/draft that may be chosen"}
    )
    tokens: int = field(default=24, metadata={"help": "written per row and pair of segments"})
    pairs: int = field(default=3, metadata={"help": "pairs of segments, dense and drafted in turn"})
    retrieval: bool = field(
        default=False, metadata={"help": "try drafts without verification, for --mode sparse"}
    )
    threads: int = field(default=2, metadata={"help": "of a CPU"})


def main(argv: list[str]) -> int:
    """Measures and writes."""
    flags: Flags = parse_flags(Flags, argv, Path(__file__).name)
    if not flags.output:
        raise UsageError("--output is missing")
    if flags.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype is {flags.dtype!r}: float32 or bfloat16 is needed")
    from jobs.calibration import measure
    from jobs.suites.shared.flags import parse_drafts, parse_numbers

    began = time.monotonic()
    torch.set_num_threads(flags.threads)
    profile = measure.measure_profile(
        flags.model,
        flags.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        flags.dtype,
        measure.CalibrationGrid(
            parse_numbers("contexts", flags.contexts),
            rows=parse_numbers("rows", flags.rows),
            drafts=parse_drafts(flags.drafts),
            tokens=flags.tokens,
            pairs=flags.pairs,
            retrieval=flags.retrieval,
        ),
        flags.threads,
    )
    write_profile(flags.output, profile)
    figures = {
        "profile": flags.output,
        "device": profile.device.name,
        "bandwidth_gbs": round(profile.device.bandwidth / 1e9, 2),
        "residual": {
            name: [round(x, 4) for x in cost.residual]
            for name, cost in measure.latency_by_draft(profile).items()
        },
        "retrieval": {
            name: [f"{r.draft_correct} of {r.dense_correct} at {r.context}" for r in found]
            for name, found in measure.retrieval_by_draft(profile).items()
        },
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(Path(__file__).name, lambda: main(sys.argv[1:])))
