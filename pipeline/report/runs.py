"""Records of runs: `<output>/_runs/<start time>-<8 hex>.json`, some kilobytes however long the run.

Only the report reads them. An output without them is complete.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline import storage
from pipeline.records import RunSnapshot, Wave
from pipeline.report.tally import PHASES, Tally

FORMAT = 1
FOLDER = "_runs"
MAX_SAMPLES = 256
MAX_WAVES = 512
JOB_GAP = 3600.0  # s between two runs that no longer count as one job


class Sample(NamedTuple):
    """State of a run at one moment. In the file it is an array in this order.

    Attributes:
        second: Seconds since the run's start.
        answered: Requests with a row, error rows included.
        failed: Error rows.
        tokens: Generated tokens.
        engine_s: Seconds of the engines' work on answered requests.
        decoding: Videos that are being decoded.
        decoded: Requests whose frames are decoded, in an engine or queued for one.
        frame_bytes: Bytes of frames that are decoding or decoded.
    """

    second: float
    answered: int
    failed: int
    tokens: int
    engine_s: float
    decoding: int
    decoded: int
    frame_bytes: int


class WaveRecord(NamedTuple):
    """One wave, or several merged ones. In the file it is an array in this order.

    Attributes:
        start: Seconds from the run's start until the wave was given to an engine.
        end: Seconds from the run's start until its latest row so far.
        requests: Number of requests.
        min_context: Tokens of the shortest context.
        max_context: Tokens of the longest context.
        engine_s: Seconds of the engine's work on its answered requests.
    """

    start: float
    end: float
    requests: int
    min_context: int
    max_context: int
    engine_s: float

    def merge(self, other: WaveRecord) -> WaveRecord:
        """Both waves as one."""
        return WaveRecord(
            start=min(self.start, other.start),
            end=max(self.end, other.end),
            requests=self.requests + other.requests,
            min_context=min(self.min_context, other.min_context),
            max_context=max(self.max_context, other.max_context),
            engine_s=round(self.engine_s + other.engine_s, 4),
        )


@dataclass
class RunRecorder:
    """Writes the record of a run under way. Seconds count from the run's start.

    The record is bounded. Above `MAX_SAMPLES` every second sample is dropped and the interval
    between samples doubles. Above `MAX_WAVES` neighbouring waves are merged in pairs.

    Attributes:
        output: Output folder.
        about: Facts about the job and the cluster.
        start_time: Seconds since 1970.
        samples: In the order of time.
        waves: In the order in which they were given to engines.
        merged: How many waves an entry of `waves` stands for.
    """

    output: str
    about: dict[str, Any]
    start_time: float = field(default_factory=time.time)
    samples: list[Sample] = field(default_factory=list)
    waves: list[WaveRecord] = field(default_factory=list)
    merged: int = 1
    _sample_interval: float = 1.0  # s
    _num_waves: int = 0
    # id of a request without a row → number of its wave
    _wave_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.start_time))
        self._uri = storage.join(self.output, FOLDER, f"{started}-{uuid.uuid4().hex[:8]}.json")

    def add_sample(
        self, second: float, tally: Tally, snapshot: RunSnapshot, force: bool = False
    ) -> None:
        """Add a sample if the interval since the previous one has passed, or if `force` is set."""
        due = not self.samples or second - self.samples[-1].second >= self._sample_interval
        if not due and not force:
            return
        sample = Sample(
            second=round(second, 2),
            answered=tally.answered,
            failed=tally.failed.total(),
            tokens=tally.tokens,
            engine_s=round(tally.engine_seconds, 3),
            decoding=snapshot.decoding,
            decoded=snapshot.decoded,
            frame_bytes=snapshot.frame_bytes,
        )
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._sample_interval *= 2

    def record_wave(self, wave: Wave, second: float) -> None:
        """Add a wave that was given to an engine."""
        contexts = [request.context for request in wave.requests]
        record = WaveRecord(
            start=round(second, 2),
            end=round(second, 2),
            requests=len(contexts),
            min_context=min(contexts),
            max_context=max(contexts),
            engine_s=0.0,
        )
        for request in wave.requests:
            self._wave_of[request.request_id] = self._num_waves
        if self._num_waves // self.merged < len(self.waves):
            self.waves[-1] = self.waves[-1].merge(record)
        else:
            self.waves.append(record)
        self._num_waves += 1
        if len(self.waves) > MAX_WAVES:
            self._merge_pairs()

    def _merge_pairs(self) -> None:
        merged = []
        for first in range(0, len(self.waves), 2):
            pair = self.waves[first : first + 2]
            merged.append(pair[0].merge(pair[1]) if len(pair) == 2 else pair[0])
        self.waves = merged
        self.merged *= 2

    def record_row(self, row: Mapping[str, Any], second: float) -> None:
        """Add a row's engine time to its wave. Rows of requests without a wave are ignored."""
        number = self._wave_of.pop(row["request_id"], None)
        if number is None:
            return
        index = number // self.merged
        wave = self.waves[index]
        engine_s = wave.engine_s + sum(row.get(f"{phase}_s") or 0.0 for phase in PHASES)
        self.waves[index] = wave._replace(end=round(second, 2), engine_s=round(engine_s, 4))

    def save(self, outcome: str, second: float) -> None:
        """Write the record.

        Args:
            outcome: `running`, `finished` or `stopped`.
            second: Seconds since the run's start.

        Raises:
            RequestError: Storage failed.
        """
        record = {
            "format": FORMAT,
            "began": self.start_time,
            "seconds": round(second, 3),
            "outcome": outcome,
            "about": self.about,
            "samples": self.samples,
            "merged": self.merged,
            "waves": self.waves,
        }
        storage.put(self._uri, json.dumps(record, separators=(",", ":")).encode())


@dataclass(frozen=True)
class RunRecord:
    """A run's record as read from its file.

    Attributes:
        start_time: Seconds since 1970.
        seconds: Duration, as far as it was recorded.
        outcome: `running` (also of a run that was killed), `finished` or `stopped`.
        about: Facts about the job and the cluster.
        samples: See `RunRecorder`.
        waves: See `RunRecorder`.
        merged: See `RunRecorder`.
    """

    start_time: float
    seconds: float
    outcome: str
    about: Mapping[str, Any]
    samples: list[Sample]
    waves: list[WaveRecord]
    merged: int

    @property
    def end_time(self) -> float:
        return self.start_time + self.seconds


def read_runs(output: str) -> list[RunRecord]:
    """The records in an output folder, oldest first. Files that are no record are skipped.

    Raises:
        RequestError: Storage failed.
    """
    folder = storage.join(output, FOLDER)
    names = [
        name
        for name in storage.list_names(folder)
        if name.endswith(".json") and not name.startswith(".")
    ]
    contents = storage.map_concurrently(
        lambda name: storage.read_bytes(storage.join(folder, name)), names
    )
    records = [_parse(content) for content in contents]
    found = [record for record in records if record is not None]
    return sorted(found, key=lambda record: record.start_time)


def _parse(content: bytes) -> RunRecord | None:
    try:
        record = json.loads(content)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    try:
        return RunRecord(
            start_time=record["began"],
            seconds=record["seconds"],
            outcome=record["outcome"],
            about=record["about"],
            samples=[Sample(*values) for values in record["samples"]],
            waves=[WaveRecord(*values) for values in record["waves"]],
            merged=record["merged"],
        )
    except (KeyError, TypeError):
        return None


def latest_job(runs: list[RunRecord], gap: float = JOB_GAP) -> list[RunRecord]:
    """The last run, and the runs before it that it resumed.

    A run counts as resumed if it ended less than `gap` seconds before the next one started.

    Args:
        runs: Oldest first.
        gap: In seconds.
    """
    job = runs[-1:]
    for run in reversed(runs[:-1]):
        if job[0].start_time - run.end_time >= gap:
            break
        job.insert(0, run)
    return job
