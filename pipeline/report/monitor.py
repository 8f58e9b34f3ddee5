"""Monitoring of a run: progress on standard error, metrics, and the run's record.

The monitor imports no Ray and does not influence the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from pipeline.intake.prefetch import Source
from pipeline.records import RequestError, RunSnapshot, Wave
from pipeline.report.metrics import Instruments, RunMetrics
from pipeline.report.progress import CountingSource, ProgressReporter, RunState, T
from pipeline.report.runs import RunRecorder

# s between two saves of the run's record, so that a killed run leaves one too
SAVE_INTERVAL = 60.0


class RunMonitor:
    """Passes a run's waves, rows and snapshots to its progress display, metrics and record.

    A context manager: on exit the last progress line is shown and the record is saved, whether or
    not the run failed.

    Args:
        output: Output folder, where the record goes.
        about: Facts about the job for the record.
        rows_written: Returns how many rows of this run are committed.
        console: Where progress is shown; standard error by default.
        clock: Seconds from an arbitrary start.
    """

    def __init__(
        self,
        output: str,
        about: Mapping[str, Any],
        rows_written: Callable[[], int],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._start = clock()
        self._rows_written = rows_written
        self._state = RunState()
        self._progress = ProgressReporter(console or Console(file=sys.stderr))
        self._metrics: RunMetrics | None = None
        self._recorder = RunRecorder(output, dict(about))
        self._last_save = 0.0  # s since the start

    def count_requests(self, source: Source[T]) -> Source[T]:
        """Wrap a source of batches of requests, so that the requests are counted when taken."""
        self._state.source = CountingSource(source)
        return self._state.source

    def show_reading(self) -> None:
        """Show that the input is being read; called while no request can run yet."""
        self._progress.show_reading(self._state, self._second)

    def record_wave(self, wave: Wave) -> None:
        """Record a wave that was given to an engine."""
        self._recorder.record_wave(wave, self._second)

    def record_row(self, row: Mapping[str, Any]) -> None:
        """Count a request's output row."""
        self._state.tally.add(row)
        self._recorder.record_row(row, self._second)
        if self._metrics is not None:
            self._metrics.observe_row(row)

    def attach_metrics(self, instruments: Instruments, **about: Any) -> None:
        """Publish metrics from now on.

        Args:
            instruments: The module `ray.util.metrics`.
            about: Facts about the cluster (engines, device, ...) for the record.

        Raises:
            RequestError: The record cannot be saved.
        """
        self._recorder.about.update(about)
        self._metrics = RunMetrics(instruments)
        self._recorder.save("running", self._second)

    def update(self, snapshot: RunSnapshot) -> None:
        """Take the driver's latest snapshot; called about once a second.

        Raises:
            RequestError: The record cannot be saved.
        """
        self._state.snapshot = snapshot
        second = self._second
        self._recorder.add_sample(second, self._state.tally, snapshot)
        self._publish()
        self._progress.show(self._state, second)
        if second - self._last_save >= SAVE_INTERVAL:
            self._last_save = second
            self._recorder.save("running", second)

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Raise RequestError if the record cannot be saved."""
        second = self._second
        self._publish()
        did_work = bool(self._state.tally.answered) or self._metrics is not None
        if did_work:
            self._progress.show(self._state, second, force=True)
        self._progress.close()
        storage_failed = isinstance(error, RequestError)
        if did_work and not storage_failed:
            self._recorder.add_sample(second, self._state.tally, self._state.snapshot, force=True)
            self._recorder.save("finished" if error is None else "stopped", second)

    def _publish(self) -> None:
        if self._metrics is not None:
            self._metrics.publish(self._state.tally, self._state.snapshot, self._rows_written())

    @property
    def _second(self) -> float:
        """Seconds since the run's start."""
        return self._clock() - self._start
