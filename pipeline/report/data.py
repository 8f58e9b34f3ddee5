"""The figures behind a report, from what a run wrote: rows, summary and the runs' records. Draws
nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.output import parts
from pipeline.records import RequestError
from pipeline.report.runs import Run, latest_job, read_runs

PHASES = ("vision", "prefill", "decode")
BINS = 60  # of a plot over time


@dataclass(frozen=True)
class ReportData:
    """What a report tells of: the rows of the last job, which is the last run and those that it
    went on from.

    Args:
        table: those rows.
        runs: their runs, as far as they left records.
        everything: rows in the folder, and how many of them are errors.
        summary: what `_summary.json` says; empty if there is none.
        price: of an hour of all machines; None if it was not given.
    """

    output: str
    table: pa.Table
    runs: list[Run]
    everything: tuple[int, int]
    summary: Mapping[str, Any]
    price: float | None = None

    def real(self, column: str) -> np.ndarray:
        """A column of numbers; what is missing is 0."""
        return np.asarray(pc.fill_null(self.table[column].cast(pa.float64()), 0.0))

    @cached_property
    def good(self) -> np.ndarray:
        """Which rows have a text."""
        return np.array(pc.fill_null(pc.not_equal(self.table["status"], "error"), False), bool)

    @cached_property
    def drafts(self) -> np.ndarray:
        """What drafted each row; empty where nothing says."""
        return np.array(self.table["draft"].fill_null("").to_pylist(), dtype=object)

    @cached_property
    def context(self) -> np.ndarray:
        """Prompt and visual tokens of each row."""
        return self.real("num_prompt_tokens") + self.real("num_visual_tokens")

    @cached_property
    def engine_s(self) -> np.ndarray:
        """Each row's share of its engine's time, in seconds: (3, rows), by phase."""
        return np.stack([self.real(f"{phase}_s") for phase in PHASES])

    @cached_property
    def began(self) -> float:
        """Seconds since 1970."""
        times = self._times
        return min(
            [*(run.began for run in self.runs), *([times.min()] if times.size else [])], default=0.0
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """When each row was there, in seconds since `began`."""
        return self._times - self.began

    @cached_property
    def _times(self) -> np.ndarray:
        return np.asarray(self.table["created_at"].cast(pa.int64()).fill_null(0)) / 1e6

    @cached_property
    def span(self) -> float:
        """Seconds from the begin to the last thing that is known."""
        ends = [run.ended - self.began for run in self.runs]
        return max([*ends, *([float(self.ends.max())] if self.ends.size else []), 1e-3])

    @cached_property
    def running(self) -> float:
        """Seconds in which a run was under way; the span where no run left a record."""
        return sum(run.seconds for run in self.runs) or self.span

    @property
    def engines(self) -> int:
        return max((int(run.about.get("engines") or 1) for run in self.runs), default=1)

    @property
    def failures(self) -> dict[str, int]:
        """Error code → rows, the most frequent first."""
        codes = self.table.filter(pa.array(~self.good))["error_code"].to_pylist()
        return dict(Counter(code or "no code" for code in codes).most_common())

    @property
    def hours(self) -> float:
        """Footage that has a text, each video once."""
        clips = (
            self.table.filter(pa.array(self.good))
            .select(["video_uri", "video_start", "video_end"])
            .to_pydict()
        )
        lengths = {(u, s): (e or 0) - (s or 0) for u, s, e in zip(*clips.values(), strict=True)}
        return sum(lengths.values()) / 3600


def gather(output: str, price: float | None = None) -> ReportData:
    """Reads an output. Raises UsageError where there is none, RequestError."""
    table = parts.read(output)
    last = latest_job(read_runs(output))
    errors = pc.sum(pc.equal(table["status"], "error")).as_py() or 0
    everything = (table.num_rows, errors)
    if last:  # clocks may differ by a second between what wrote the row and what began the run
        since = pa.scalar(int((last[0].began - 1) * 1e6), pa.timestamp("us", tz="UTC"))
        table = table.filter(pc.greater_equal(table["created_at"], since))
    return ReportData(
        storage.redact(output),
        table=table,
        runs=last,
        everything=everything,
        summary=_summary(output),
        price=price,
    )


def _summary(output: str) -> Mapping[str, Any]:
    try:
        found = json.loads(storage.read_bytes(storage.join(output, "_summary.json")))
    except RequestError as error:
        if error.code != "not_found":
            raise
        return {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------- over time


def edges(facts: ReportData) -> np.ndarray:
    """Borders of equal stretches of time, in seconds; none is shorter than a second."""
    return np.linspace(0.0, facts.span, 1 + int(np.clip(facts.span, 1, BINS)))


def per_second(facts: ReportData, weights: np.ndarray) -> np.ndarray:
    """What came per second in each stretch of time, booked when the row was there."""
    borders = edges(facts)
    return np.histogram(facts.ends, borders, weights=weights)[0] / np.diff(borders)


def busy(facts: ReportData) -> np.ndarray:
    """(3, stretches): share of the engines' time by phase, as late as it can have been: work on a
    row was done before the row was there, and engines do no more than a second's work in a
    second."""
    borders = edges(facts)
    room = np.diff(borders) * facts.engines
    work = np.stack(
        [np.histogram(facts.ends, borders, weights=phase)[0] for phase in facts.engine_s]
    )
    for later in range(len(room) - 1, 0, -1):
        total = work[:, later].sum()
        if total > room[later]:
            early = work[:, later] * (1 - room[later] / total)
            work[:, later] -= early
            work[:, later - 1] += early
    return work / room


# --------------------------------------------------------------------------------------- by context


@dataclass(frozen=True)
class Bucket:
    """The rows of one draft in one class of context lengths."""

    longest: int  # tokens, a power of two
    draft: str
    rows: int
    tokens: float
    rounds: float
    proposed: float
    accepted: float
    error: float  # standard error of accepted over proposed, between rows
    seconds: tuple[float, ...]  # in the engine, by phase

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """What a pass of the full model yields, its own token included; more than the speed-up can
        be."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds[2] if self.seconds[2] else 0.0


def buckets(facts: ReportData) -> list[Bucket]:
    """Of the rows that have a text, by context length and draft, shortest first."""
    context = np.maximum(facts.context[facts.good], 1)
    longest = 2 ** np.ceil(np.log2(context)).astype(np.int64)
    drafts = facts.drafts[facts.good]
    keys = sorted(set(zip(longest.tolist(), drafts.tolist(), strict=True)))
    return [_bucket(facts, *key, (longest == key[0]) & (drafts == key[1])) for key in keys]


def _bucket(facts: ReportData, longest: int, draft: str, among: np.ndarray) -> Bucket:
    tokens, rounds, proposed, accepted = (
        facts.real(name)[facts.good][among]
        for name in ("num_generated_tokens", "rounds", "proposed", "accepted")
    )
    seconds = tuple(float(s) for s in facts.engine_s[:, facts.good][:, among].sum(1))
    t, r, p, a = (float(values.sum()) for values in (tokens, rounds, proposed, accepted))
    return Bucket(
        longest,
        draft=draft,
        rows=int(among.sum()),
        tokens=t,
        rounds=r,
        proposed=p,
        accepted=a,
        error=_error(accepted, proposed),
        seconds=seconds,
    )


def _error(accepted: np.ndarray, proposed: np.ndarray) -> float:
    """Of a ratio of sums."""
    count = len(proposed)
    whole = proposed.sum()
    if count < 2 or not whole:
        return 0.0
    rest = accepted - accepted.sum() / whole * proposed
    return float(np.sqrt(count / (count - 1) * (rest**2).sum()) / whole)


def speedups(found: list[Bucket]) -> list[tuple[int, float, float]]:
    """(context, speed-up, bound) of the classes that were decoded both with a draft and densely."""
    dense = {bucket.longest: bucket.speed for bucket in found if bucket.draft == "dense"}
    drafted = [bucket for bucket in found if bucket.proposed and dense.get(bucket.longest)]
    return [(b.longest, b.speed / dense[b.longest], b.tokens_per_pass) for b in drafted]
