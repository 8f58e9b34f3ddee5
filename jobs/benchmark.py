#!/usr/bin/env python
"""Run one benchmark suite; standard output ends with its figures as one JSON object.

    python jobs/benchmark.py --suite demo_quality --seed 7 --clips 200

The other flags belong to the suite; `--suite NAME --help` lists them. The exit code is 1 where the
measurement does not answer the suite's question; the key `failed` says why.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

if not __package__:  # run as a script: this checkout outranks an installed copy
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline import logs
from pipeline.command_line import did_you_mean
from pipeline.records import INTERRUPTED, UsageError

logger = logging.getLogger(__name__)

SUITES = {  # by name, the module in `jobs/suites/`
    "acceptance": "acceptance.suite",
    "chaos": "chaos",
    "decode": "decode.suite",
    "demo_quality": "demo_quality",
    "frames": "frames",
    "gpu": "gpu.suite",
    "lossless": "lossless",
    "memory": "memory.suite",
    "pipeline": "pipeline",
    "schedule": "schedule",
}


def main(argv: list[str]) -> int:
    """Imports the suite only now: each brings its own dependencies, and the suite `gpu` next to
    none."""
    known = sorted(SUITES)
    words = [word for a in argv for word in (a.split("=", 1) if a.startswith("--suite=") else [a])]
    if "--suite" not in words[:-1]:
        raise UsageError(f"--suite is missing; there are: {', '.join(known)}")
    at = words.index("--suite")
    name = words[at + 1]
    if name not in known:
        raise UsageError(
            f"--suite {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}"
        )
    figures = importlib.import_module(f"jobs.suites.{SUITES[name]}").run(
        words[:at] + words[at + 2 :]
    )
    print(json.dumps(figures), flush=True)
    if why := figures.get("failed"):
        logger.error("%s: %s", Path(__file__).name, why)
    return 1 if why else 0


def _guarded(argv: list[str]) -> int:
    """Exit code 2 and a sentence for what is wrong with the command line or the machine, 130 where
    Ctrl-C stopped it."""
    logs.configure()
    try:
        return main(argv)
    except UsageError as error:
        code = 2
        why = str(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
        why = "stopped"
    logger.error("%s: %s", Path(__file__).name, " ".join(why.split()))
    return code


if __name__ == "__main__":
    sys.exit(_guarded(sys.argv[1:]))
