#!/usr/bin/env python
"""Show what a job would do, from headers alone: no frame is decoded, no GPU is needed.

    python jobs/plan.py --input videos/ --model demo
    python jobs/plan.py --input s3://bucket/videos/ --model qwen2-vl-7b --profile profile.json

Prints requests, tokens, waves and their drafts, time and cost, and which requests would fail and
why. Takes the flags of caption_archive.py. Standard output ends with the plan as one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name, __doc__, plan_only=True))
