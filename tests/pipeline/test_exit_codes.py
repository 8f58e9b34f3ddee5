"""Which exit code a run that ends early has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.job import run_guarded
from pipeline.records import Interrupted, RequestError, RunError, UsageError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    # a process in the background of a script ignores SIGINT, and so do the tests in it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (RunError("x"), 1),
        (RequestError("storage_error", "x"), 1),
        (Interrupted("x", signal.SIGINT), 130),
        (Interrupted("x", signal.SIGTERM), 1),
    ],
)
def test_an_error_has_its_exit_code(error: Exception, code: int) -> None:
    def work() -> int:
        raise error

    assert run_guarded("job", work) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_signal_before_the_run_has_its_exit_code(
    number: signal.Signals, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> int:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not delivered")

    assert run_guarded("job", work) == code
    assert "the same command resumes" in caplog.text
