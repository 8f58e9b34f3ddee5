"""Numbers, durations and counts as text."""

from __future__ import annotations


def format_number(value: float) -> str:
    """Three significant digits, or all before the decimal point: `0.0123`, `43.5`, `12,346`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """The duration in the unit that fits: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_count(count: int, noun: str) -> str:
    """The count with its noun: `1 request`, `2,000 requests`."""
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"


def shorten(text: str, max_chars: int) -> str:
    """The text, cut to `max_chars` characters; an ellipsis marks the cut."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
