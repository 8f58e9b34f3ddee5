"""A run's metrics, under the names that Prometheus finds at every node's metrics port (Ray adds
`ray_` in front and `_total` behind counters). Imports no Ray: the driver hands `ray.util.metrics`
over, so that this can be tested, and rows be counted, before there is a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.records import RunSnapshot
from pipeline.report.tally import (
    Tally,
)

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "std_caption_requests_done": ("requests whose row has a text", ()),
    "std_caption_requests_failed": ("requests whose row is an error, by its code", ("code",)),
    "std_caption_rows_written": ("rows that are committed to the output", ()),
    "std_caption_tokens_generated": ("tokens in the rows' texts", ()),
    "std_caption_drafts_proposed": ("drafted tokens that were verified", ()),
    "std_caption_drafts_accepted": (
        "drafted tokens that the full model would have written too",
        (),
    ),
    "std_caption_engine_deaths": (
        "engines that died, hung or ran out of memory, and were replaced",
        (),
    ),
    "std_caption_rounds": ("rounds of drafting and verification, summed over rows", ()),
    "std_caption_engine_seconds": (
        "seconds of engines' work on rows that are answered, by phase",
        ("phase",),
    ),
}
GAUGES = {
    "std_caption_frame_bytes_in_flight": "bytes of frames that are decoding or held",
    "std_caption_videos_decoding": "videos whose frames are being decoded",
    "std_caption_engines": "engines that run",
    "std_caption_requests_seated": "requests in engines, or before them with their frames decoded",
}
HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "std_caption_request_engine_seconds": (
        "an answered request's share of its engine's time",
        [0.1, 0.3, 1, 3, 10, 30, 100, 300],
    ),
    "std_caption_context_tokens": (
        "prompt and visual tokens of an answered request",
        [2.0**n for n in range(8, 19)],
    ),
    "std_caption_accepted_per_round": (
        "drafted tokens accepted per round, over an answered request",
        [0.5, 1, 2, 3, 4, 6, 8, 12],
    ),
}


class Instruments(Protocol):
    """What is used of the module `ray.util.metrics`."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class Metrics:
    """The instruments of one process. Counters follow a run's sums, so what was counted before they
    were made is in."""

    def __init__(self, make: Instruments):
        self._counters = {
            name: make.Counter(name, text, tags) for name, (text, tags) in COUNTERS.items()
        }
        self._gauges = {name: make.Gauge(name, text) for name, text in GAUGES.items()}
        self._histograms = {
            name: make.Histogram(name, text, bounds) for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._published: dict[tuple[str, ...], float] = {}

    def publish(self, tally: Tally, snapshot: RunSnapshot, written: int) -> None:
        """Brings counters up to the sums and sets gauges."""
        sums = {
            "requests_done": tally.done,
            "rows_written": written,
            "tokens_generated": tally.tokens,
            "drafts_proposed": tally.proposed,
            "drafts_accepted": tally.accepted,
            "engine_deaths": snapshot.deaths,
            "rounds": tally.rounds,
        }
        for name, value in sums.items():
            self._raise(f"std_caption_{name}", value)
        for code, count in tally.failed.items():
            self._raise("std_caption_requests_failed", count, code=code)
        for phase, seconds in tally.seconds.items():
            self._raise("std_caption_engine_seconds", seconds, phase=phase)
        for name, value in zip(
            GAUGES,
            (snapshot.frame_bytes, snapshot.decoding, snapshot.engines, snapshot.decoded),
            strict=True,
        ):
            self._gauges[name].set(value)

    def row(self, row: Mapping[str, Any]) -> None:
        """Observes an answered request; error rows have nothing to observe."""
        if row["status"] == "error":
            return
        seconds = sum(row[name] for name in ("vision_s", "prefill_s", "decode_s"))
        context = row["num_prompt_tokens"] + row["num_visual_tokens"]
        self._histograms["std_caption_request_engine_seconds"].observe(seconds)
        self._histograms["std_caption_context_tokens"].observe(context)
        if row["proposed"]:
            self._histograms["std_caption_accepted_per_round"].observe(
                row["accepted"] / row["rounds"]
            )

    def _raise(self, name: str, value: float, **tags: str) -> None:
        """Ray's counters take what is added, and nothing that is not above 0."""
        key = (name, *tags.values())
        if (more := value - self._published.get(key, 0)) > 0:
            self._counters[name].inc(more, tags)
            self._published[key] = value
