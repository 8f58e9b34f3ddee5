#!/usr/bin/env python
"""Measure a device with a model, and write the profile that --profile reads.

    python jobs/calibrate.py --model demo --output profile.json

Times dense steps, verifications and draft steps of each draft over a grid of batch sizes and
contexts, prefill, vision and selection, and counts accepted tokens. Takes minutes. Standard output
ends with one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from pipeline.command_line import flag, parse_flags
from pipeline.job import run_guarded
from pipeline.plan.profile_file import write_profile
from std_core.types import Dtype


@dataclass(frozen=True)
class Flags:
    """The command line."""

    model: str = flag("demo", "preset of conf/model, hub id, or folder")
    output: str = flag("", "where the profile is written")
    device: Literal["", "cpu", "cuda"] = flag("", "cpu or cuda; default: cuda where there is one")
    dtype: Dtype = flag("float32", "of weights and KV cache")
    contexts: str = flag("512,2048,8192", "context lengths of the grid, in tokens")
    rows: str = flag("1,8", "batch sizes of the grid")
    drafts: str = flag("std,int8,int4,ngram", "presets of conf/draft that the scheduler may choose")
    keeps: str = flag(
        "0.03,0.06,0.12,0.2,0.35,0.6", "shares of the visual entries that a draft may keep"
    )
    tokens: int = flag(24, "generated tokens per row in a pair of timed segments")
    pairs: int = flag(3, "pairs of timed segments, dense and drafted in turn")
    retrieval: bool = flag(False, "test drafts without verification, for --mode sparse")
    threads: int = flag(2, "threads on a CPU")


def main(argv: list[str]) -> int:
    """Measure, and write the profile."""
    flags = parse_flags(
        Flags, argv, Path(__file__).name, description=__doc__ or "", required=("output",)
    )
    from jobs.calibration import measure
    from jobs.suites.shared.flags import parse_drafts, parse_numbers, parse_shares

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
            keeps=parse_shares("keeps", flags.keeps),
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
    sys.exit(run_guarded(Path(__file__).name, lambda: main(sys.argv[1:])))
