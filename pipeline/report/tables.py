"""A report's tables: failed and slowest requests, what was written, the runs; and `text`, which
every word passes."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.report.data import PHASES, ReportData
from pipeline.report.monitor import duration

# rows in the tables at most
SLOWEST = 10
FAILED = 25
SAMPLED = 12


def tables(facts: ReportData) -> Iterable[tuple[str, str, str]]:
    """Title, note and table; empty ones are left out."""
    if bad := facts.table.num_rows - int(facts.good.sum()):
        shown = "All of them" if bad <= FAILED else f"{FAILED} of {bad:,}, some of each code"
        note = f"{shown}. The same command with --retry-failed runs them again."
        yield (
            "Failed requests",
            note,
            _failures(_some_of_each(facts.table.filter(pa.array(~facts.good)))),
        )
    if facts.good.any():
        order = np.argsort(-facts.engine_s.sum(0) * facts.good, kind="stable")[
            : min(SLOWEST, int(facts.good.sum()))
        ]
        note = "By their share of their engine's time. Expect long contexts and long texts; others are worth a look."
        yield "Slowest requests", note, _slow(facts.table.take(pa.array(order)).to_pylist())
        spread = np.flatnonzero(facts.good)
        spread = spread[np.linspace(0, len(spread) - 1, min(SAMPLED, len(spread))).astype(int)]
        note = "Spread evenly over the run. A text marked “cut off” ended at --max-tokens."
        yield (
            "A sample of what was written",
            note,
            _sample(facts.table.take(pa.array(spread)).to_pylist()),
        )
    if facts.runs:
        yield (
            "Runs",
            "Start-up of the cluster and the engines is part of a run's time.",
            _runs(facts),
        )


def _some_of_each(failed: pa.Table) -> list[dict[str, Any]]:
    """Rows of every code, as evenly as there are any, sorted by code."""
    seen: Counter[str] = Counter()
    ranked = []
    for number, code in enumerate(failed["error_code"].to_pylist()):
        ranked.append((seen[code], code or "", number))
        seen[code] += 1
    chosen = sorted((code, number) for _, code, number in sorted(ranked)[:FAILED])
    return failed.take(pa.array([number for _, number in chosen], pa.int64())).to_pylist()


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    head = ("video", "prompt", "code", "message", "#attempts")
    return _table(head, [
        (_name(r), text(_short(r["prompt"])), f'<span class="code">{text(r["error_code"])}</span>',
         text(_short(r["error_message"], 400)), text(r["attempts"] or ""))
        for r in rows
    ])  # fmt: skip


def _slow(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "video",
        "prompt",
        "#context",
        "#tokens",
        "#engine, s",
        "#decoding, s",
        "#accepted per round",
    )
    return _table(head, [
        (_name(r), text(_short(r["prompt"])), f"{(r['num_prompt_tokens'] or 0) + (r['num_visual_tokens'] or 0):,}",
         f"{r['num_generated_tokens'] or 0:,}", f"{sum(r[f'{p}_s'] or 0 for p in PHASES):,.2f}",
         f"{r['decode_s'] or 0:,.2f}", f"{r['accepted'] / r['rounds']:.2f}" if r["proposed"] else "")
        for r in rows
    ])  # fmt: skip


def _sample(rows: Sequence[dict[str, Any]]) -> str:
    cut = ' <span class="code">cut off</span>'
    return _table(("video", "prompt", "text"), [
        (_name(r), text(_short(r["prompt"])), text(_short(r["text"], 600)) + cut * (r["status"] == "truncated"))
        for r in rows
    ])  # fmt: skip


def _runs(facts: ReportData) -> str:
    head = ("began, UTC", "#took", "#engines", "device", "model", "draft", "outcome")
    outcome = {"running": "killed, or still running"}
    return _table(head, [
        (datetime.fromtimestamp(run.began, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"), duration(run.seconds),
         *(text(run.about.get(key) or "") for key in ("engines", "device", "model", "draft")),
         text(outcome.get(run.outcome, run.outcome)))
        for run in facts.runs
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; a column whose name begins with # holds numbers."""
    kinds = [' class="n"' if name[0] == "#" else "" for name in head]
    top = "".join(
        f"<th{kind}>{name.lstrip('#')}</th>" for kind, name in zip(kinds, head, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


def _name(row: dict[str, Any]) -> str:
    """A video's file name, with its whole URI (without credentials) where the pointer rests."""
    uri = storage.redact(row["video_uri"] or "")
    return f'<span title="{text(uri)}">{text(uri.rstrip("/").rpartition("/")[2] or uri)}</span>'


def _short(words: str | None, most: int = 160) -> str:
    words = words or ""
    return words if len(words) <= most else words[: most - 1] + "…"


def count(number: int, what: str) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def text(value: object) -> str:
    """Words for the page: nothing in them is markup, and what writes from right to left turns
    nothing around it."""
    words = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return html.escape(words, quote=True)
