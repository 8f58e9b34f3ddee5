"""The tables of a report: failed and slowest requests, a sample of the texts, the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.formatting import format_duration, shorten
from pipeline.report.data import ReportData
from pipeline.report.runs import RunRecord
from pipeline.report.tally import PHASES

# rows per table
MAX_SLOWEST = 10
MAX_FAILED = 25
MAX_TEXTS = 12
# characters per cell
MAX_PROMPT = 160
MAX_MESSAGE = 400
MAX_TEXT = 600

Row = Mapping[str, Any]  # of the output


@dataclass(frozen=True)
class Column:
    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell as unescaped text; the template escapes it.

    Attributes:
        text: Its text.
        tooltip: Shown while the pointer rests on it.
        is_code: Whether it is an error code.
        remark: Set off behind the text.
    """

    text: str
    tooltip: str | None = None
    is_code: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: list[Column]
    rows: list[list[Cell]]


def tables(data: ReportData) -> list[Table]:
    """The tables that have rows, in the order of the page."""
    found = []
    if data.num_errors:
        found.append(_failed_table(data))
    if data.num_texts:
        found.append(_slowest_table(data))
        found.append(_sample_table(data))
    if data.runs:
        found.append(_runs_table(data))
    return found


def _failed_table(data: ReportData) -> Table:
    shown = "All of them"
    if data.num_errors > MAX_FAILED:
        shown = f"{MAX_FAILED} of {data.num_errors:,}, some of each code"
    return Table(
        title="Failed requests",
        note=f"{shown}. The same command with --retry-failed runs them again.",
        columns=[
            Column("video"),
            Column("prompt"),
            Column("code"),
            Column("message"),
            Column("attempts", numeric=True),
        ],
        rows=[_failed_cells(row) for row in _balanced_by_code(data.error_rows)],
    )


def _balanced_by_code(error_rows: pa.Table) -> list[Row]:
    """At most `MAX_FAILED` rows, distributed evenly over the codes and sorted by code."""
    rows_of_code: Counter[str] = Counter()
    candidates = []  # (rank within its code, code, index)
    for index, code in enumerate(error_rows["error_code"].to_pylist()):
        candidates.append((rows_of_code[code], code or "", index))
        rows_of_code[code] += 1
    chosen = sorted((code, index) for _, code, index in sorted(candidates)[:MAX_FAILED])
    indices = pa.array([index for _, index in chosen], pa.int64())
    return list(error_rows.take(indices).to_pylist())


def _failed_cells(row: Row) -> list[Cell]:
    return [
        _video_cell(row),
        _prompt_cell(row),
        Cell(str(row["error_code"]), is_code=True),
        Cell(shorten(row["error_message"] or "", MAX_MESSAGE)),
        Cell(str(row["attempts"] or "")),
    ]


def _slowest_table(data: ReportData) -> Table:
    slowest_first = np.argsort(-data.engine_seconds * data.has_text, kind="stable")
    count = min(MAX_SLOWEST, data.num_texts)
    rows = data.table.take(pa.array(slowest_first[:count])).to_pylist()
    return Table(
        title="Slowest requests",
        note=(
            "By their share of their engine's time. Expect long contexts and long texts; others "
            "are worth a look."
        ),
        columns=[
            Column("video"),
            Column("prompt"),
            Column("context", numeric=True),
            Column("tokens", numeric=True),
            Column("engine, s", numeric=True),
            Column("decoding, s", numeric=True),
            Column("accepted per round", numeric=True),
        ],
        rows=[_slowest_cells(row) for row in rows],
    )


def _slowest_cells(row: Row) -> list[Cell]:
    context_tokens = (row["num_prompt_tokens"] or 0) + (row["num_visual_tokens"] or 0)
    engine_seconds = sum(row[f"{phase}_s"] or 0 for phase in PHASES)
    accepted_per_round = f"{row['accepted'] / row['rounds']:.2f}" if row["proposed"] else ""
    return [
        _video_cell(row),
        _prompt_cell(row),
        Cell(f"{context_tokens:,}"),
        Cell(f"{row['num_generated_tokens'] or 0:,}"),
        Cell(f"{engine_seconds:,.2f}"),
        Cell(f"{row['decode_s'] or 0:,.2f}"),
        Cell(accepted_per_round),
    ]


def _sample_table(data: ReportData) -> Table:
    with_text = np.flatnonzero(data.has_text)
    spread = np.linspace(0, len(with_text) - 1, min(MAX_TEXTS, len(with_text))).astype(int)
    rows = data.table.take(pa.array(with_text[spread])).to_pylist()
    return Table(
        title="A sample of what was written",
        note="Spread evenly over the run. A text marked “cut off” ended at --max-tokens.",
        columns=[Column("video"), Column("prompt"), Column("text")],
        rows=[_sample_cells(row) for row in rows],
    )


def _sample_cells(row: Row) -> list[Cell]:
    remark = "cut off" if row["status"] == "truncated" else ""
    text = Cell(shorten(row["text"] or "", MAX_TEXT), remark=remark)
    return [_video_cell(row), _prompt_cell(row), text]


def _runs_table(data: ReportData) -> Table:
    return Table(
        title="Runs",
        note="Start-up of the cluster and the engines is part of a run's time.",
        columns=[
            Column("began, UTC"),
            Column("took", numeric=True),
            Column("engines", numeric=True),
            Column("device"),
            Column("model"),
            Column("draft"),
            Column("outcome"),
        ],
        rows=[_run_cells(run) for run in data.runs],
    )


def _run_cells(run: RunRecord) -> list[Cell]:
    start = datetime.fromtimestamp(run.start_time, timezone.utc)
    # a killed run cannot update its record
    outcome = "killed, or still running" if run.outcome == "running" else run.outcome
    about = [Cell(str(run.about.get(key) or "")) for key in ("engines", "device", "model", "draft")]
    return [
        Cell(f"{start:%Y-%m-%d %H:%M:%S}"),
        Cell(format_duration(run.seconds)),
        *about,
        Cell(outcome),
    ]


def _video_cell(row: Row) -> Cell:
    """The video's file name; its URI without credentials is the tooltip."""
    uri = storage.redact(row["video_uri"] or "")
    name = uri.rstrip("/").rpartition("/")[2]
    return Cell(name or uri, tooltip=uri)


def _prompt_cell(row: Row) -> Cell:
    return Cell(shorten(row["prompt"] or "", MAX_PROMPT))
