"""What a run leaves for its report beside its rows: `_runs/<when it began>-<8 hex>.json` in the
output, some kilobytes however long the run is. Nothing else reads it; an output without it is
whole."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import storage
from pipeline.records import RunSnapshot, Wave
from pipeline.report.tally import (
    Tally,
)

FORMAT = 1
FOLDER = "_runs"
# kept at most
SAMPLES = 256
WAVES = 512
SAMPLE = ("second", "answered", "failed", "tokens", "engine_s", "decoding", "seated", "bytes")
WAVE = ("began", "ended", "requests", "shortest", "longest", "engine_s")


@dataclass
class RunRecorder:
    """The record of a run under way. Seconds count from the run's begin.

    Attributes: samples: rows of `SAMPLE`; from 256 on every second one is dropped, and they are
        taken half as often. waves: rows of `WAVE` in the order in which they were handed out,
        `began` then and `ended` with the last answer
            so far; from 512 on neighbours are merged in pairs, and `merged` says how many a row
            stands for.
    """

    output: str
    about: dict[str, Any]
    began: float = field(default_factory=time.time)
    samples: list[tuple[float, ...]] = field(default_factory=list)
    waves: list[list[float]] = field(default_factory=list)
    merged: int = 1
    _every: float = 1.0  # s
    _handed: int = 0  # waves
    _wave_of: dict[str, int] = field(
        default_factory=dict
    )  # request that has no row yet → number of its wave

    def __post_init__(self) -> None:
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.began))
        self._uri = storage.join(self.output, FOLDER, f"{when}-{uuid.uuid4().hex[:8]}.json")

    def sample(
        self, second: float, tally: Tally, snapshot: RunSnapshot, last: bool = False
    ) -> None:
        """Takes a sample if it is time for one; `last` takes it anyway."""
        if self.samples and second - self.samples[-1][0] < self._every and not last:
            return
        sums = (tally.answered, tally.failed.total(), tally.tokens, round(tally.engine_s, 3))
        self.samples.append(
            (round(second, 2), *sums, snapshot.decoding, snapshot.decoded, snapshot.frame_bytes)
        )
        if len(self.samples) > SAMPLES:
            self.samples = self.samples[::2]
            self._every = 2 * self._every

    def record_wave(self, wave: Wave, second: float) -> None:
        """Notes that a wave's turn has come."""
        contexts = [request.context for request in wave.requests]
        row = [round(second, 2), round(second, 2), len(contexts), min(contexts), max(contexts), 0.0]
        self._wave_of.update(dict.fromkeys((r.request_id for r in wave.requests), self._handed))
        if self._handed // self.merged < len(self.waves):
            self.waves[-1] = _joined(self.waves[-1], row)
        else:
            self.waves.append(row)
        self._handed += 1
        if len(self.waves) > WAVES:
            pairs = [self.waves[i : i + 2] for i in range(0, len(self.waves), 2)]
            self.waves = [_joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self.merged = 2 * self.merged

    def answered(self, row: Mapping[str, Any], second: float) -> None:
        """Notes a request's row in its wave, if it had one."""
        number = self._wave_of.pop(row["request_id"], None)
        if number is not None:
            wave = self.waves[number // self.merged]
            wave[1] = round(second, 2)
            wave[5] = round(
                wave[5] + sum(row.get(n) or 0.0 for n in ("vision_s", "prefill_s", "decode_s")), 4
            )

    def save(self, outcome: str, second: float) -> None:
        """Writes the record as it is now: `outcome` is running, finished or stopped. Raises
        RequestError."""
        record = {
            "format": FORMAT,
            "began": self.began,
            "seconds": round(second, 3),
            "outcome": outcome,
            "about": self.about,
            "samples": self.samples,
            "merged": self.merged,
            "waves": self.waves,
        }
        storage.put(self._uri, json.dumps(record, separators=(",", ":")).encode())


def _joined(first: list[float], second: list[float]) -> list[float]:
    """Two waves as one."""
    (b, e, n, s, l, t), (b2, e2, n2, s2, l2, t2) = first, second  # noqa: E741
    return [min(b, b2), max(e, e2), n + n2, min(s, s2), max(l, l2), round(t + t2, 4)]


@dataclass(frozen=True)
class Run:
    """A run as its record tells it; `began` is in seconds since 1970."""

    began: float
    seconds: float
    outcome: str
    about: Mapping[str, Any]
    samples: list[list[float]]
    waves: list[list[float]]
    merged: int

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def read_runs(output: str) -> list[Run]:
    """The runs that left a record, in the order of their begins; what is no record counts as
    absent. Raises RequestError."""
    folder = storage.join(output, FOLDER)
    names = [
        name for name in storage.list_names(folder) if name.endswith(".json") and name[0] != "."
    ]
    found = storage.map_concurrently(
        lambda name: _parsed(storage.read_bytes(storage.join(folder, name))), names
    )
    return sorted((run for run in found if run is not None), key=lambda run: run.began)


def _parsed(data: bytes) -> Run | None:
    try:
        record = json.loads(data)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    return Run(**{name: record[name] for name in Run.__dataclass_fields__})


def latest_job(found: list[Run], gap: float = 3600.0) -> list[Run]:
    """The last run and those before it that ended less than `gap` seconds before the next began: a
    job that was stopped and went on is one job to the person who started it."""
    stretch = found[-1:]
    for run in reversed(found[:-1]):
        if stretch[0].began - run.ended >= gap:
            break
        stretch.insert(0, run)
    return stretch
