"""Configuration of this project's log messages.

Every module logs to `logging.getLogger(__name__)`. A program calls `configure` once to write these
messages to standard error.

Other libraries' loggers keep their own configuration. Without `configure` Python's default
applies: warnings and errors go to standard error, the rest is dropped.
"""

from __future__ import annotations

import logging
import sys

from pipeline.credentials import redact_text

LEVELS = ("debug", "info", "warning", "error")
# The roots of the loggers of this project; a job that runs as a script is named `__main__`.
LOGGERS = ("pipeline", "std_core", "jobs", "__main__")


class StderrHandler(logging.Handler):
    """Writes messages to the current `sys.stderr`, without the credentials of URLs in them.

    `rich` replaces `sys.stderr` while it draws a progress bar. Messages that go there appear above
    the bar; the original stream would mix them into it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(redact_text(self.format(record)), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def configure(level: str = "info") -> None:
    """Write this project's log messages of `level` and above to standard error, as plain text.

    A further call changes the level.

    Args:
        level: One of `LEVELS`.

    Raises:
        ValueError: `level` is not one of them.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    handler = StderrHandler()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        for other in list(logger.handlers):
            if isinstance(other, StderrHandler):
                logger.removeHandler(other)
        logger.addHandler(handler)
