"""Work that a thread does ahead of the one who needs it: headers are read while engines run. What
comes out is taken by one thread, never waited for, and everything is made in another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

WAIT = 5.0  # s for a thread to end

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """What is made elsewhere, and taken once it is there."""

    @property
    def closed(self) -> bool:
        """Whether everything was made and taken."""

    def take(self, seconds: float = 0.0) -> T_co | None:
        """The next thing; None if there is none within so many seconds. Raises what its making
        raised."""


class _Closed(Exception):
    """Nobody takes anything any longer."""


class Prefetcher(Generic[T]):
    """What `make` hands to its argument, at most `most` of it ahead of `take`. A context
    manager."""

    def __init__(self, make: Callable[[Callable[[T], None]], None], most: int):
        self._make = make
        self._made: queue.Queue[T] = queue.Queue(most)
        self._unwanted = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive() and self._failure is None and self._made.empty()

    def take(self, seconds: float = 0.0) -> T | None:
        """The next thing; None if there is none within so many seconds. Raises what `make` raised,
        behind what it made before."""
        try:
            return self._made.get(timeout=seconds) if seconds else self._made.get_nowait()
        except queue.Empty:
            if not self._thread.is_alive() and self._failure is not None and self._made.empty():
                raise self._failure from None
            return None

    def close(self) -> None:
        """Ends the thread at its next step; does not wait for long, since that may be a slow look
        at storage."""
        self._unwanted.set()
        self._thread.join(WAIT)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._make(self._put)
        except _Closed:
            return
        except BaseException as error:  # raised again where it is taken
            self._failure = error

    def _put(self, made: T) -> None:
        while not self._unwanted.is_set():
            try:
                return self._made.put(made, timeout=0.2)
            except queue.Full:
                continue
        raise _Closed
