"""A bounded queue that a thread fills: headers are read while engines run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

JOIN_SECONDS = 5.0  # to wait for the thread on close
PUT_SECONDS = 0.2  # between checks whether the queue was closed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Items that another thread or process makes; polled by one thread."""

    @property
    def closed(self) -> bool:
        """Whether all items were made and taken."""

    def take(self, timeout: float = 0.0) -> T_co | None:
        """The next item, or None if none arrives within `timeout` seconds. Raises the exception
        that ended the making of items."""


class Prefetcher(Generic[T]):
    """A `Source` whose items a thread takes from an iterable, at most `capacity` ahead of `take`.

    A context manager, which ends the thread.
    """

    def __init__(self, items: Iterable[T], capacity: int):
        self._items = items
        self._queue: queue.Queue[T] = queue.Queue(capacity)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._finished and self._failure is None

    def take(self, timeout: float = 0.0) -> T | None:
        """As `Source.take`. An exception of the iterable is raised after the items before it."""
        try:
            return self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            if self._finished and self._failure is not None:
                raise self._failure from None
            return None

    def close(self) -> None:
        """Ends the thread after the item that it is making. Waits only a short time for that, since
        a read from storage may be slow."""
        self._stop.set()
        self._thread.join(JOIN_SECONDS)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _finished(self) -> bool:
        """Whether the thread has ended and nothing is left in the queue."""
        return not self._thread.is_alive() and self._queue.empty()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as error:  # raised again in `take`
            self._failure = error

    def _put(self, item: T) -> bool:
        """Waits for room in the queue; False if the queue was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False
