#!/usr/bin/env python
"""Write the HTML report of an output: `_report.html` in its folder, one self-contained page.

    python jobs/report.py --output s3://bucket/captions --price-per-hour 4.10

Standard output ends with one JSON object: the page's URI, and the numbers of rows and errors in it.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: this checkout takes precedence over an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.command_line import flag, parse_flags
from pipeline.job import run_guarded
from pipeline.report.overview import headline
from pipeline.report.page import write_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flags:
    """The command line."""

    output: str = flag("", "folder or bucket prefix that a run wrote to")
    price_per_hour: float | None = flag(None, "of all machines together, in any currency")


def main(argv: list[str]) -> int:
    """Write the page and log its headline."""
    flags = parse_flags(
        Flags, argv, Path(__file__).name, description=__doc__ or "", required=("output",)
    )
    page_uri, data = write_report(flags.output, flags.price_per_hour)
    logger.info("%s", headline(data))
    result = {"report": page_uri, "rows": data.num_rows, "errors": data.num_errors}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(Path(__file__).name, lambda: main(sys.argv[1:])))
