"""Data of a report: the rows of an output, its summary, and the records of its runs."""

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
from pipeline.output import reader
from pipeline.records import RequestError
from pipeline.report.runs import RunRecord, latest_job, read_runs
from pipeline.report.tally import PHASES

CLOCK_SKEW = 1.0  # s by which a row's `created_at` may precede the start of its run


@dataclass(frozen=True)
class ReportData:
    """The rows and runs of an output's latest job: its last run and the runs that it resumed.

    Attributes:
        output: URI of the output, without credentials.
        table: The rows of the latest job.
        runs: The records of its runs, oldest first; empty if they left none.
        total_rows: Rows in the output, earlier jobs included.
        total_errors: Error rows among them.
        summary: Content of `_summary.json`; empty if there is none.
        price_per_hour: Of all machines together; None if it was not given.
    """

    output: str
    table: pa.Table
    runs: list[RunRecord]
    total_rows: int
    total_errors: int
    summary: Mapping[str, Any]
    price_per_hour: float | None = None

    def numbers(self, column: str) -> np.ndarray:
        """A numeric column as float64, (rows,). Missing values are 0."""
        return np.asarray(pc.fill_null(self.table[column].cast(pa.float64()), 0.0))

    @cached_property
    def has_text(self) -> np.ndarray:
        """Which rows are no errors, (rows,)."""
        return np.array(pc.fill_null(pc.not_equal(self.table["status"], "error"), False), bool)

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def num_texts(self) -> int:
        return int(self.has_text.sum())

    @property
    def num_errors(self) -> int:
        return self.num_rows - self.num_texts

    @cached_property
    def drafts(self) -> np.ndarray:
        """Name of each row's draft, (rows,); empty where the row has none."""
        return np.array(self.table["draft"].fill_null("").to_pylist(), dtype=object)

    @cached_property
    def context_tokens(self) -> np.ndarray:
        """Prompt and visual tokens of each row, (rows,)."""
        return self.numbers("num_prompt_tokens") + self.numbers("num_visual_tokens")

    @cached_property
    def phase_seconds(self) -> dict[str, np.ndarray]:
        """Phase → each row's share of its engine's time in seconds, (rows,)."""
        return {phase: self.numbers(f"{phase}_s") for phase in PHASES}

    @cached_property
    def engine_seconds(self) -> np.ndarray:
        """Each row's share of its engine's time in seconds, all phases, (rows,)."""
        return np.sum(list(self.phase_seconds.values()), axis=0)

    @cached_property
    def start_time(self) -> float:
        """Start of the first run, or the first row if that is earlier; seconds since 1970."""
        starts = [run.start_time for run in self.runs]
        if self._row_times.size:
            starts.append(float(self._row_times.min()))
        return min(starts, default=0.0)

    @cached_property
    def row_seconds(self) -> np.ndarray:
        """When each row was created, in seconds since `start_time`, (rows,)."""
        return self._row_times - self.start_time

    @cached_property
    def _row_times(self) -> np.ndarray:
        microseconds = self.table["created_at"].cast(pa.int64()).fill_null(0)
        return np.asarray(microseconds) / 1e6

    @cached_property
    def total_seconds(self) -> float:
        """Seconds from `start_time` to the last row or the end of the last run."""
        ends = [run.end_time - self.start_time for run in self.runs]
        if self.row_seconds.size:
            ends.append(float(self.row_seconds.max()))
        return max([*ends, 1e-3])

    @cached_property
    def running_seconds(self) -> float:
        """Seconds in which a run was under way; `total_seconds` if no run left a record."""
        return sum(run.seconds for run in self.runs) or self.total_seconds

    @property
    def num_engines(self) -> int:
        """The largest number of engines of any run."""
        return max((int(run.about.get("engines") or 1) for run in self.runs), default=1)

    @property
    def utilization(self) -> float:
        """Share of the running time in which engines worked."""
        return float(self.engine_seconds.sum() / self.num_engines / self.running_seconds)

    @property
    def tokens_per_second(self) -> float:
        return float(self.numbers("num_generated_tokens").sum() / self.running_seconds)

    @property
    def accepted_per_round(self) -> float | None:
        """Accepted tokens per round over all rows; None without rounds."""
        rounds = self.numbers("rounds").sum()
        return float(self.numbers("accepted").sum() / rounds) if rounds else None

    @property
    def total_cost(self) -> float | None:
        """Cost of the running time; None without a price."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.running_seconds / 3600

    @property
    def errors_by_code(self) -> dict[str, int]:
        """Error code → rows, the most frequent first."""
        codes = self.error_rows["error_code"].to_pylist()
        return dict(Counter(code or "no code" for code in codes).most_common())

    @property
    def error_rows(self) -> pa.Table:
        return self.table.filter(pa.array(~self.has_text))

    @property
    def footage_hours(self) -> float:
        """Hours of footage with a text; each video counts once."""
        columns = ["video_uri", "video_start", "video_end"]
        rows = self.table.filter(pa.array(self.has_text)).select(columns).to_pylist()
        seconds = {}
        for row in rows:
            start = row["video_start"] or 0
            seconds[row["video_uri"], row["video_start"]] = (row["video_end"] or 0) - start
        return sum(seconds.values()) / 3600


def load_report_data(output: str, price_per_hour: float | None = None) -> ReportData:
    """Read an output folder.

    Raises:
        UsageError: There is no output in this folder.
        RequestError: Storage failed.
    """
    table = reader.read(output)
    total_rows = table.num_rows
    total_errors = pc.sum(pc.equal(table["status"], "error")).as_py() or 0
    runs = latest_job(read_runs(output))
    if runs:
        earliest = int((runs[0].start_time - CLOCK_SKEW) * 1e6)
        since = pa.scalar(earliest, pa.timestamp("us", tz="UTC"))
        table = table.filter(pc.greater_equal(table["created_at"], since))
    return ReportData(
        output=storage.redact(output),
        table=table,
        runs=runs,
        total_rows=total_rows,
        total_errors=total_errors,
        summary=_read_summary(output),
        price_per_hour=price_per_hour,
    )


def _read_summary(output: str) -> Mapping[str, Any]:
    try:
        summary = json.loads(storage.read_bytes(storage.join(output, "_summary.json")))
    except RequestError as error:
        if error.code != "not_found":
            raise
        return {}
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}
