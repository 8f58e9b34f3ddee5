from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline import logs
from pipeline.config import ROOT


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_messages_are_plain_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    logs.configure("info")  # a second call adds no second line
    for name in ("pipeline.job", "std_core.engine.engine", "jobs.report", "__main__"):
        logging.getLogger(name).info("one line of %s", name)
        logging.getLogger(name).debug("not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "one line of pipeline.job",
        "one line of std_core.engine.engine",
        "one line of jobs.report",
        "one line of __main__",
    ]


def test_the_level_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("pipeline.driver.driver")
    logs.configure("debug")
    logger.debug("shown at debug")
    logs.configure("error")
    logger.warning("not shown at error")
    logger.error("shown at error")
    assert capsys.readouterr().err == "shown at debug\nshown at error\n"


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="'loud' is not one of debug, info, warning, error"):
        logs.configure("loud")


def test_loggers_of_other_libraries_keep_pythons_default() -> None:
    script = (
        "import logging; from pipeline import logs; logs.configure('debug');"
        "other = logging.getLogger('other'); other.info('quiet'); other.warning('loud')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr == "loud\n"


def test_messages_show_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    logging.getLogger("pipeline.job").error("403 for %s, skipped", "HTTPS://u:pw@h/a.mp4?jwt=eyJ")
    [line] = capsys.readouterr().err.splitlines()
    assert "pw" not in line and "eyJ" not in line
    assert line.startswith("403 for https://") and line.endswith(", skipped")
