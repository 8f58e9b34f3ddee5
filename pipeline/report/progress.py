"""Progress of a run on standard error: a progress bar on a terminal, log messages elsewhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from pipeline.formatting import format_duration, format_number
from pipeline.intake.prefetch import Source
from pipeline.records import RunSnapshot
from pipeline.report.tally import Tally

LOG_INTERVAL = 5.0  # s between two log messages
TERMINAL_INTERVAL = 0.5  # s between two updates of the progress bar
SPEED_WINDOW = 60.0  # s over which speed is measured

T = TypeVar("T", bound=Sized)

logger = logging.getLogger(__name__)


@dataclass
class CountingSource(Generic[T]):
    """A source of batches that counts the items that were taken from it."""

    source: Source[T]
    count: int = 0

    @property
    def closed(self) -> bool:
        """See `Source`."""
        return self.source.closed

    def take(self, seconds: float = 0.0) -> T | None:
        """See `Source`."""
        batch = self.source.take(seconds)
        if batch is not None:
            self.count += len(batch)
        return batch


@dataclass
class RunState:
    """What is known about a run under way.

    Attributes:
        tally: Sums over the rows.
        snapshot: The driver's latest snapshot.
        source: Source of the requests that had no row at the run's start; None before it is read.
    """

    tally: Tally = field(default_factory=Tally)
    snapshot: RunSnapshot = field(default_factory=RunSnapshot)
    source: CountingSource[Any] | None = None

    @property
    def known_requests(self) -> int:
        """Requests that were read from the input so far."""
        return self.source.count if self.source is not None else 0

    @property
    def input_complete(self) -> bool:
        """Whether the whole input was read."""
        return self.source is not None and self.source.closed


class ProgressReporter:
    """Shows how far a run is, at most once per interval.

    Args:
        console: Where the progress bar is drawn if it is a terminal.
    """

    def __init__(self, console: Console):
        self._bar = ProgressBar(console) if console.is_terminal else None
        self._interval = LOG_INTERVAL if self._bar is None else TERMINAL_INTERVAL
        self._speed = SpeedWindow()
        self._last_shown = 0.0  # s since the run's start

    def show(self, state: RunState, second: float, force: bool = False) -> None:
        """Show speed, estimated time left and where the requests are.

        Args:
            state: The run's current state.
            second: Seconds since the run's start.
            force: Show it even if the interval has not passed.
        """
        if force or self._due(second):
            self._speed.add(second, state.tally)
            self._show(progress_line(state, second, self._speed), state, second)

    def show_reading(self, state: RunState, second: float) -> None:
        """Show that the input is being read and no request can run yet. Arguments as in `show`."""
        if self._due(second):
            self._speed.add(second, state.tally)
            line = f"[{second:.0f} s] reading the input: {state.known_requests} requests"
            self._show(line, state, second)

    def close(self) -> None:
        """End the progress bar; its last line stays on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _due(self, second: float) -> bool:
        return second - self._last_shown >= self._interval

    def _show(self, line: str, state: RunState, second: float) -> None:
        self._last_shown = second
        if self._bar is None:
            logger.info("%s", line)
        else:
            self._bar.show(line, completed=state.tally.answered, total=state.known_requests)


class ProgressBar:
    """A bar with one line of text that is redrawn in place."""

    def __init__(self, console: Console):
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        # no refresh thread: the bar is drawn only by `show`
        self._progress = Progress(
            BarColumn(bar_width=24), text, console=console, auto_refresh=False
        )
        self._task = self._progress.add_task("")
        self._started = False

    def show(self, line: str, completed: int, total: int) -> None:
        """Redraw the bar. A `total` of 0 means that it is unknown."""
        if not self._started:
            self._progress.start()
            self._started = True
        self._progress.update(
            self._task,
            description=line,
            completed=completed,
            total=total or None,
            refresh=True,
        )

    def close(self) -> None:
        if self._started:
            self._progress.stop()


class _Measurement(NamedTuple):
    second: float
    answered: int
    tokens: int


class SpeedWindow:
    """Speed over the last `SPEED_WINDOW` seconds."""

    def __init__(self) -> None:
        self._measurements: deque[_Measurement] = deque()

    def add(self, second: float, tally: Tally) -> None:
        """Add the sums at this moment and drop those that left the window."""
        self._measurements.append(_Measurement(second, tally.answered, tally.tokens))
        while len(self._measurements) > 2 and second - self._measurements[1].second > SPEED_WINDOW:
            self._measurements.popleft()

    @property
    def tokens_per_second(self) -> float:
        return (self._last.tokens - self._first.tokens) / self._duration if self._measured else 0.0

    @property
    def requests_per_second(self) -> float:
        if not self._measured:
            return 0.0
        return (self._last.answered - self._first.answered) / self._duration

    @property
    def _measured(self) -> bool:
        return len(self._measurements) >= 2

    @property
    def _first(self) -> _Measurement:
        return self._measurements[0]

    @property
    def _last(self) -> _Measurement:
        return self._measurements[-1]

    @property
    def _duration(self) -> float:
        return max(self._last.second - self._first.second, 1e-9)


def progress_line(state: RunState, second: float, speed: SpeedWindow) -> str:
    """What is done, how fast, how long the rest takes, and where the remaining requests are."""
    tally = state.tally
    failed = f" ({tally.failed.total()} failed)" if tally.failed else ""
    total = f"{state.known_requests}" + ("" if state.input_complete else " and more")
    parts = [f"[{second:.0f} s] {tally.answered} answered{failed} of {total}"]
    if speed.tokens_per_second:
        parts.append(f"{format_number(speed.tokens_per_second)} tokens/s")
    if tally.rounds:
        parts.append(f"{tally.accepted / tally.rounds:.2f} accepted per round")
    seconds_left = _seconds_left(state, speed)
    if seconds_left is not None:
        parts.append(f"about {format_duration(seconds_left)} left")
    parts.append(_remaining(state.snapshot))
    return "; ".join(parts)


def _seconds_left(state: RunState, speed: SpeedWindow) -> float | None:
    """Seconds until all requests have a row, at the current speed; None if it is unknown.

    Requests with long contexts run first, so the estimate is rather too high than too low.
    """
    remaining = state.known_requests - state.tally.answered
    if not state.input_complete or remaining <= 0 or not speed.requests_per_second:
        return None
    return remaining / speed.requests_per_second


def _remaining(snapshot: RunSnapshot) -> str:
    """Where the requests without a row are."""
    waiting = "decoded" if snapshot.engines else "waiting for an engine to start"
    engines = "the engine" if snapshot.engines < 2 else f"{snapshot.engines} engines"
    counts = [
        (snapshot.decoding, "videos decoding"),
        (snapshot.waiting, f"requests {waiting}"),
        (snapshot.in_engine, f"requests in {engines}"),
        (snapshot.suspects, "requests to run again, whose engine died"),
        (snapshot.deaths, "engines replaced"),
    ]
    parts = [f"{count} {description}" for count, description in counts if count]
    return f"{', '.join(parts) or 'nothing left'}; {snapshot.frame_bytes / 1e6:.0f} MB of frames"
