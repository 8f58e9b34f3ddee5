#!/usr/bin/env python
"""Answer the rows of a manifest, each a video and a question.

    python jobs/annotate_dataset.py --input questions.parquet --output answers/ --model demo
    python jobs/annotate_dataset.py --input rows.csv --output answers/ \\
        --video-column clip --question-column ask

A video is decoded and prefilled once for all its questions. The manifest's columns are carried to
the output. The same command run again answers only what has no row yet. Standard output ends with
the summary as one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name, __doc__, default_prompt=""))
