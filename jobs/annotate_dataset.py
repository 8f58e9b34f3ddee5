#!/usr/bin/env python
"""Answers rows of (video, question); a video is decoded once for all its questions.

    python jobs/annotate_dataset.py --input questions.parquet --output s3://bucket/answers --model
    demo python jobs/annotate_dataset.py --input rows.csv --video-column clip --question-column ask
    --output answers

The input's own columns come along into the output. A second run of the same command does what is
missing and nothing else. Standard output ends with the summary as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name, default_prompt=""))
