from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.intake.prefetch import Prefetcher
from pipeline.records import UsageError


def drain(prefetcher: Prefetcher[int]) -> list[int]:
    taken = []
    while not prefetcher.closed:
        if (item := prefetcher.take(0.01)) is not None:
            taken.append(item)
    return taken


def test_items_keep_their_order_and_at_most_the_capacity_is_made_ahead() -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(1, 101):
            made = number
            yield number

    with Prefetcher(items(), 3) as prefetcher:
        deadline = time.monotonic() + 10
        while made < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made == 4 and not prefetcher.closed
        assert drain(prefetcher) == list(range(1, 101))


def test_an_empty_queue_is_not_closed_while_the_thread_runs() -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        go.wait()
        yield 7

    with Prefetcher(items(), 1) as prefetcher:
        assert prefetcher.take() is None and not prefetcher.closed
        go.set()
        assert drain(prefetcher) == [7]
        assert prefetcher.take() is None


def test_an_exception_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise UsageError("line 2 is broken")

    with Prefetcher(items(), 5) as prefetcher:
        assert prefetcher.take(10) == 1
        with pytest.raises(UsageError, match="line 2"):
            drain(prefetcher)


def test_closing_ends_a_thread_that_waits_for_room() -> None:
    with Prefetcher(iter(range(1000)), 1) as prefetcher:
        pass
    assert not prefetcher._thread.is_alive()
