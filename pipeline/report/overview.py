"""The sentences and figures at the top of a report."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.formatting import format_count, format_duration, format_number
from pipeline.report.data import ReportData

NAMED_CODES = 4  # error codes that the headline names


@dataclass(frozen=True)
class Tile:
    value: str
    label: str


def headline(data: ReportData) -> str:
    """How many requests were answered and how fast, what failed, and what drafting gained."""
    if not data.num_rows:
        return "Nothing was captioned: this output has no rows yet."
    requests = format_count(data.num_rows, "request")
    duration = format_duration(data.running_seconds)
    if data.num_texts:
        rate = _request_rate(data.num_texts / data.running_seconds)
        tokens = format_number(data.tokens_per_second)
        answered = (
            f"{data.num_texts:,} of {requests} answered in {duration}: {rate}, "
            f"{tokens} tokens a second."
        )
    else:
        answered = f"None of {requests} was answered (in {duration})."
    sentences = (answered, _failed_sentence(data), _drafting_sentence(data))
    return " ".join(sentence for sentence in sentences if sentence)


def _request_rate(per_second: float) -> str:
    """Requests per the unit of time in which at least one is answered."""
    if per_second >= 1:
        return f"{format_number(per_second)} a second"
    per_minute = 60 * per_second
    if per_minute >= 1:
        return f"{format_number(per_minute)} a minute"
    return f"{format_number(60 * per_minute)} an hour"


def _failed_sentence(data: ReportData) -> str:
    rows_by_code = data.errors_by_code
    if not rows_by_code:
        return "None failed."
    most_frequent = list(rows_by_code.items())[:NAMED_CODES]
    named = ", ".join(f"{rows:,} {code}" for code, rows in most_frequent)
    unnamed = len(rows_by_code) - len(most_frequent)
    others = f" and {unnamed} other codes" if unnamed else ""
    return f"{data.num_errors:,} failed: {named}{others}."


def _drafting_sentence(data: ReportData) -> str:
    drafted = data.numbers("proposed") > 0
    accepted = data.accepted_per_round
    if not drafted.any() or accepted is None:
        return ""
    kv_keep = data.numbers("kv_keep")[data.has_text & drafted].mean()
    return (
        f"Drafting read {kv_keep:.0%} of the context and had {accepted:.2f} tokens accepted per "
        f"round, so a pass of the full model yielded {1 + accepted:.2f} tokens instead of 1."
    )


def coverage(data: ReportData) -> str:
    """Which runs and rows the report shows, and whether the input is finished."""
    sentences = []
    if len(data.runs) > 1:
        sentences.append(f"{len(data.runs)} runs, less than an hour apart, are shown as one.")
    if not data.runs and data.total_rows:
        sentences.append(
            "No run left a record here, so time is counted from the first row to the last."
        )
    if data.total_rows > data.num_rows:
        sentences.append(
            f"Earlier runs' rows are in the folder too: {data.total_rows:,} in all, "
            f"{data.total_errors:,} of them errors."
        )
    if data.runs and data.runs[-1].outcome != "finished":
        sentences.append("The last run did not finish; the same command resumes it.")
    elif "requests" in data.summary:
        requests = format_count(data.summary["requests"], "request")
        errors = data.summary.get("errors", 0)
        sentences.append(f"All {requests} of the input have their rows, {errors:,} of them errors.")
    return " ".join(sentences)


def tiles(data: ReportData) -> list[Tile]:
    """The main figures."""
    found = [
        Tile(f"{data.num_texts:,}", "answered"),
        Tile(f"{data.num_errors:,}", "failed"),
        Tile(format_number(data.tokens_per_second), "tokens a second"),
        Tile(f"{data.utilization:.0%}", "of the time engines worked"),
    ]
    if data.accepted_per_round is not None:
        found.append(Tile(f"{data.accepted_per_round:.2f}", "accepted per round"))
    found.append(Tile(f"{format_number(data.footage_hours)} h", "of footage"))
    return found + _cost_tiles(data)


def _cost_tiles(data: ReportData) -> list[Tile]:
    """The whole cost, and the cost per unit of work; none without a price."""
    cost = data.total_cost
    if cost is None:
        return []
    found = [Tile(format_number(cost), "cost")]
    tokens = data.numbers("num_generated_tokens").sum()
    if data.num_texts:
        found.append(Tile(format_number(1000 * cost / data.num_texts), "per 1,000 answers"))
    if tokens:
        found.append(Tile(format_number(1e6 * cost / tokens), "per million tokens"))
    if data.footage_hours:
        found.append(Tile(format_number(cost / data.footage_hours), "per hour of footage"))
    return found
