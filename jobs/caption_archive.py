#!/usr/bin/env python
"""Captions every video of an archive; each --prompt is answered by each video.

    python jobs/caption_archive.py --input s3://bucket/videos/ --output s3://bucket/captions --model
    demo ray job submit --working-dir . -- python jobs/caption_archive.py --config conf/nightly.yaml

A second run of the same command does what is missing and nothing else. Standard output ends with
the summary as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name))
