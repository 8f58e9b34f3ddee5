"""Prometheus metrics of a run, published through `ray.util.metrics`.

Ray serves them at every node's metrics port and adds `ray_` in front of the names and `_total`
behind those of counters. The driver passes the module `ray.util.metrics` in: this file imports no
Ray, so rows can be counted before there is a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipeline.records import RunSnapshot
from pipeline.report.tally import PHASES, Tally


class CounterSpec(NamedTuple):
    description: str
    tags: tuple[str, ...] = ()


class HistogramSpec(NamedTuple):
    description: str
    boundaries: list[float]


COUNTERS = {
    "std_caption_requests_done": CounterSpec("requests whose row has a text"),
    "std_caption_requests_failed": CounterSpec(
        "requests whose row is an error, by its code", ("code",)
    ),
    "std_caption_rows_written": CounterSpec("rows that are committed to the output"),
    "std_caption_tokens_generated": CounterSpec("tokens in the rows' texts"),
    "std_caption_drafts_proposed": CounterSpec("drafted tokens that were verified"),
    "std_caption_drafts_accepted": CounterSpec(
        "drafted tokens that the full model would have written too"
    ),
    "std_caption_engine_deaths": CounterSpec(
        "engines that died, hung or ran out of memory, and were replaced"
    ),
    "std_caption_rounds": CounterSpec("rounds of drafting and verification, summed over rows"),
    "std_caption_engine_seconds": CounterSpec(
        "seconds of engines' work on rows that are answered, by phase", ("phase",)
    ),
}
GAUGES = {
    "std_caption_frame_bytes_in_flight": "bytes of frames that are decoding or decoded",
    "std_caption_videos_decoding": "videos whose frames are being decoded",
    "std_caption_engines": "engines that run",
    "std_caption_requests_seated": "requests in engines, or queued for them with decoded frames",
}
HISTOGRAMS = {
    "std_caption_request_engine_seconds": HistogramSpec(
        "an answered request's share of its engine's time",
        [0.1, 0.3, 1, 3, 10, 30, 100, 300],
    ),
    "std_caption_context_tokens": HistogramSpec(
        "prompt and visual tokens of an answered request",
        [2.0**exponent for exponent in range(8, 19)],
    ),
    "std_caption_accepted_per_round": HistogramSpec(
        "drafted tokens accepted per round, averaged over an answered request",
        [0.5, 1, 2, 3, 4, 6, 8, 12],
    ),
}


class Instruments(Protocol):
    """The part of the module `ray.util.metrics` that is used."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class RunMetrics:
    """The metrics of one run.

    Counters are set from the run's sums, so they include rows from before they were created.
    """

    def __init__(self, instruments: Instruments):
        self._counters = {
            name: instruments.Counter(name, spec.description, spec.tags)
            for name, spec in COUNTERS.items()
        }
        self._gauges = {
            name: instruments.Gauge(name, description) for name, description in GAUGES.items()
        }
        self._histograms = {
            name: instruments.Histogram(name, spec.description, spec.boundaries)
            for name, spec in HISTOGRAMS.items()
        }
        self._published: dict[tuple[str, ...], float] = {}  # counter and its tags → value

    def publish(self, tally: Tally, snapshot: RunSnapshot, rows_written: int) -> None:
        """Raise the counters to the current sums and set the gauges."""
        self._count("std_caption_requests_done", tally.succeeded)
        self._count("std_caption_rows_written", rows_written)
        self._count("std_caption_tokens_generated", tally.tokens)
        self._count("std_caption_drafts_proposed", tally.proposed)
        self._count("std_caption_drafts_accepted", tally.accepted)
        self._count("std_caption_engine_deaths", snapshot.deaths)
        self._count("std_caption_rounds", tally.rounds)
        for code, count in tally.failed.items():
            self._count("std_caption_requests_failed", count, code=code)
        for phase, seconds in tally.phase_seconds.items():
            self._count("std_caption_engine_seconds", seconds, phase=phase)
        self._gauges["std_caption_frame_bytes_in_flight"].set(snapshot.frame_bytes)
        self._gauges["std_caption_videos_decoding"].set(snapshot.decoding)
        self._gauges["std_caption_engines"].set(snapshot.engines)
        self._gauges["std_caption_requests_seated"].set(snapshot.decoded)

    def observe_row(self, row: Mapping[str, Any]) -> None:
        """Add a row to the histograms. Error rows are left out: they have no figures."""
        if row["status"] == "error":
            return
        engine_seconds = sum(row[f"{phase}_s"] for phase in PHASES)
        context_tokens = row["num_prompt_tokens"] + row["num_visual_tokens"]
        self._histograms["std_caption_request_engine_seconds"].observe(engine_seconds)
        self._histograms["std_caption_context_tokens"].observe(context_tokens)
        if row["proposed"]:
            accepted_per_round = row["accepted"] / row["rounds"]
            self._histograms["std_caption_accepted_per_round"].observe(accepted_per_round)

    def _count(self, name: str, value: float, **tags: str) -> None:
        """Raise a counter to `value`. Ray's counters accept only increments above 0."""
        key = (name, *tags.values())
        increment = value - self._published.get(key, 0)
        if increment > 0:
            self._counters[name].inc(increment, tags)
            self._published[key] = value
