from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pipeline.intake.prefetch import Prefetcher
from pipeline.records import UsageError


def drain(ahead: Prefetcher[int]) -> list[int]:
    taken = []
    while not ahead.closed:
        if (made := ahead.take(0.01)) is not None:
            taken.append(made)
    return taken


def test_everything_comes_out_in_order_and_little_is_made_ahead() -> None:
    made = 0

    def make(put: Callable[[int], None]) -> None:
        nonlocal made
        for made in range(1, 101):
            put(made)

    with Prefetcher(make, 3) as ahead:
        deadline = time.monotonic() + 10
        while made < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made == 4 and not ahead.closed
        assert drain(ahead) == list(range(1, 101))


def test_nothing_yet_is_not_the_end() -> None:
    go = threading.Event()

    def make(put: Callable[[int], None]) -> None:
        go.wait()
        put(7)

    with Prefetcher(make, 1) as ahead:
        assert ahead.take() is None and not ahead.closed
        go.set()
        assert drain(ahead) == [7]
        assert ahead.take() is None


def test_what_goes_wrong_is_raised_behind_what_was_made() -> None:
    def make(put: Callable[[int], None]) -> None:
        put(1)
        raise UsageError("line 2 is broken")

    with Prefetcher(make, 5) as ahead:
        assert ahead.take(10) == 1
        with pytest.raises(UsageError, match="line 2"):
            drain(ahead)


def test_a_thread_that_nobody_listens_to_ends() -> None:
    with Prefetcher(lambda put: [put(i) for i in range(1000)], 1) as ahead:
        pass
    assert not ahead._thread.is_alive()
