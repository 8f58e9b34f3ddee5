#!/usr/bin/env python
"""What a job would be: videos, tokens, waves and their drafts, hours, and which requests would fail
and why. No frame is decoded.

    python jobs/plan.py --input s3://bucket/videos/ --model qwen2-vl-7b --fps 1

Takes the flags of `caption_archive.py`, whose --dry-run it is. Standard output ends with the plan
as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name, dry=True))
