"""What a run has done so far: counted from its rows, told on standard error, and handed on to the
metrics and to the record that the run leaves for its report. Knows no Ray and decides nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from pipeline.intake.prefetch import Source
from pipeline.records import RequestError, RunSnapshot, Wave
from pipeline.report.metrics import Instruments, Metrics
from pipeline.report.runs import RunRecorder
from pipeline.report.tally import Tally

LINE = 5.0  # s between two lines in a log
WINDOW = 60.0  # s over which speed is told
SAVE = 60.0  # s between two saves of the run's record, for runs that are killed

T = TypeVar("T", bound=Sized)


class RunMonitor:
    """The eyes on one run; a context manager, so that the last line is told and the record is saved
    however it ends.

    Args:
        output: where the record goes.
        about: what the record says of the job.
        written: how many rows of this run are committed.
        console: where progress is told; standard error if not given.
    """

    def __init__(
        self,
        output: str,
        about: Mapping[str, Any],
        written: Callable[[], int],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._began = clock()
        self.tally = Tally()
        self.snapshot = RunSnapshot()
        self._log = RunRecorder(output, dict(about))
        self._written = written
        self._screen = Screen(console or Console(file=sys.stderr))
        self._metrics: Metrics | None = None
        self._found: Counted[Any] | None = None
        self._recent: deque[tuple[float, int, int]] = deque()  # s, answered, tokens
        self._told = self._saved = self._seconds()

    def count_requests(self, found: Source[T]) -> Source[T]:
        """The same batches of requests without a row, counted as they pass."""
        self._found = Counted(found)
        return self._found

    @property
    def _known(self) -> int:
        """Requests without a row that were seen."""
        return self._found.count if self._found else 0

    @property
    def _closed(self) -> bool:
        """Whether that is all."""
        return self._found is not None and self._found.closed

    def show_reading(self) -> None:
        """To be called while there is nothing yet that could run."""
        self._tell("reading the input")

    def record_wave(self, wave: Wave) -> None:
        """Takes note of a wave whose turn has come."""
        self._log.record_wave(wave, self._seconds())

    def record_row(self, row: Mapping[str, Any]) -> None:
        """Takes note of a request's row."""
        self.tally.add(row)
        self._log.answered(row, self._seconds())
        if self._metrics is not None:
            self._metrics.row(row)

    def attach_metrics(self, instruments: Instruments, **where: Any) -> None:
        """From now on metrics are published; `where` (engines, device, ...) goes into the
        record."""
        self._log.about.update(where)
        self._metrics = Metrics(instruments)
        self._log.save("running", self._seconds())

    def update(self, snapshot: RunSnapshot) -> None:
        """To be called at every turn of the driver, about once a second."""
        self.snapshot = snapshot
        self._log.sample(self._seconds(), self.tally, snapshot)
        if self._metrics is not None:
            self._metrics.publish(self.tally, snapshot, self._written())
        self._tell()
        if self._seconds() - self._saved >= SAVE:
            self._saved = self._seconds()
            self._log.save("running", self._saved)

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Raises RequestError if the record cannot be saved."""
        if self._metrics is not None:
            self._metrics.publish(self.tally, self.snapshot, self._written())
        worked = self.tally.answered or self._metrics is not None
        if worked:
            self._note(self._seconds())
            self._screen.show(self.line(), self.tally.answered, self._known)
        self._screen.close()
        if worked and not isinstance(error, RequestError):  # then storage is what failed
            self._log.sample(self._seconds(), self.tally, self.snapshot, last=True)
            self._log.save("finished" if error is None else "stopped", self._seconds())

    def line(self) -> str:
        """What is done, how fast, and where the rest is."""
        t = self.tally
        seconds = self._seconds()
        failed = f" ({t.failed.total()} failed)" if t.failed else ""
        parts = [f"[{seconds:.0f} s] {t.answered} answered{failed}{self._of()}"]
        rate, left = self._speed()
        if rate:
            parts.append(f"{number(rate)} tokens/s")
        if t.rounds:
            parts.append(f"{t.accepted / t.rounds:.2f} accepted per round")
        if left is not None:
            parts.append(f"about {duration(left)} left")
        return "; ".join([*parts, _places(self.snapshot)])

    def _of(self) -> str:
        return f" of {self._known}" if self._closed else f" of {self._known} and more"

    def _speed(self) -> tuple[float, float | None]:
        """Tokens per second, and seconds until the requests known now are answered, by the speed of
        the last minute. Long contexts go first, so it is rather too much than too little."""
        if len(self._recent) < 2:
            return 0.0, None
        (then, before, fewer), (now, answered, tokens) = self._recent[0], self._recent[-1]
        pace = (answered - before) / max(now - then, 1e-9)
        left = (
            (self._known - answered) / pace
            if pace and self._closed and answered < self._known
            else None
        )
        return (tokens - fewer) / max(now - then, 1e-9), left

    def _tell(self, instead: str = "") -> None:
        now = self._seconds()
        if now - self._told < (LINE if not self._screen.live else 0.5):
            return
        self._told = now
        self._note(now)
        text = f"[{now:.0f} s] {instead}: {self._known} requests" if instead else self.line()
        self._screen.show(text, self.tally.answered, self._known)

    def _note(self, now: float) -> None:
        self._recent.append((now, self.tally.answered, self.tally.tokens))
        while len(self._recent) > 2 and now - self._recent[1][0] > WINDOW:
            self._recent.popleft()

    def _seconds(self) -> float:
        return self._clock() - self._began


@dataclass
class Counted(Generic[T]):
    """A source of batches that counts what is in them."""

    source: Source[T]
    count: int = 0

    @property
    def closed(self) -> bool:
        """See `Source`."""
        return self.source.closed

    def take(self, seconds: float = 0.0) -> T | None:
        """See `Source`."""
        batch = self.source.take(seconds)
        self.count += len(batch) if batch is not None else 0
        return batch


@dataclass
class Screen:
    """One line that changes on a terminal, lines one below the other elsewhere."""

    console: Console
    _bar: Progress | None = None

    @property
    def live(self) -> bool:
        return self.console.is_terminal

    def show(self, text: str, done: int, total: int) -> None:
        """Replaces the line, or prints another."""
        if not self.live:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if self._bar is None:  # no thread of its own: it is drawn when it is told to
            told = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            columns = (BarColumn(bar_width=24), told)
            self._bar = Progress(*columns, console=self.console, auto_refresh=False)
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            description=text,
            completed=done,
            total=total or None,
            refresh=True,
        )

    def close(self) -> None:
        """Leaves the last line where it stands."""
        if self._bar is not None:
            self._bar.stop()


def _places(snapshot: RunSnapshot) -> str:
    started = snapshot.engines > 0
    places = [
        (snapshot.decoding, "videos decoding"),
        (
            snapshot.waiting,
            "requests decoded" if started else "requests waiting for an engine to start",
        ),
        (
            snapshot.in_engine,
            "requests in the engine"
            if snapshot.engines < 2
            else f"requests in {snapshot.engines} engines",
        ),
        (snapshot.suspects, "requests to run again, whose engine died"),
        (snapshot.deaths, "engines replaced"),
    ]
    where = ", ".join(f"{count} {what}" for count, what in places if count) or "nothing left"
    return f"{where}; {snapshot.frame_bytes / 1e6:.0f} MB of frames"


def number(value: float) -> str:
    """Three digits of it, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """As people say it: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
