#!/usr/bin/env python
"""Put every --prompt to every video of an archive; the answers go to Parquet, one row each.

    python jobs/caption_archive.py --input videos/ --output captions/ --model demo
    python jobs/caption_archive.py --config conf/nightly.yaml
    ray job submit --working-dir . -- python jobs/caption_archive.py --config conf/nightly.yaml

The same command run again answers only what has no row yet. Standard output ends with the summary
as one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).name, __doc__))
