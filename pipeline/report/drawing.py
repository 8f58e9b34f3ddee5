"""Style of a report's plots, and their conversion to inline SVG.

The SVG contains no script and no reference to anything outside; its text stays text.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter

from pipeline.report.data import ReportData

INK = "#33404d"
GRID = "#d9dfe5"
COLORS = {
    "vision": "#4e9a8f",
    "prefill": "#e0a43c",
    "decode": "#3f6fb5",
    "idle": "#e6eaee",
    "error": "#c0504d",
}
DRAFT_COLORS = ("#3f6fb5", "#4e9a8f", "#b5618f", "#8a7a3c", "#6d6d6d")
PHASE_LABELS = {"vision": "vision", "prefill": "prefill", "decode": "decoding", "idle": "idle"}
MAX_LABEL = 32  # characters of a draft's name or an error code
WIDTH = 7.6  # inches, of every figure
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: searchable, and readable by screen readers
    "text.parse_math": False,  # a `$` in a name is a dollar sign
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


class Drawn(NamedTuple):
    """A figure and a caption that says what to look for.

    Without a figure the caption says why there is none.
    """

    caption: str
    figure: Figure | None = None


@dataclass(frozen=True)
class Plot:
    """A plot as it stands in the page.

    Attributes:
        name: Anchor of its heading.
        title: Heading.
        caption: See `Drawn`.
        svg: The `<svg>` element; empty if there is no figure.
    """

    name: str
    title: str
    caption: str
    svg: Markup


class TimeUnit(NamedTuple):
    name: str
    seconds: int


def subplots(height: float, rows: int) -> tuple[Figure, tuple[Any, ...]]:
    """A figure of `height` inches with `rows` axes, one below the other, that share the x axis."""
    figure = Figure((WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, tuple(axes[:, 0])


def time_unit(data: ReportData) -> TimeUnit:
    """The unit that fits the length of the job."""
    if data.total_seconds < 180:
        return TimeUnit("seconds", 1)
    if data.total_seconds < 10_800:
        return TimeUnit("minutes", 60)
    return TimeUnit("hours", 3600)


def scale_time(data: ReportData, seconds: np.ndarray) -> np.ndarray:
    """Seconds since the start, in the unit of the time axis."""
    return seconds / time_unit(data).seconds


def time_label(data: ReportData) -> str:
    """Label of the time axis."""
    start = datetime.fromtimestamp(data.start_time, timezone.utc)
    return f"{time_unit(data).name} since {start:%Y-%m-%d %H:%M UTC}"


def thousands_formatter() -> Formatter:
    """Ticks as `12,000`."""
    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def percent_formatter() -> Formatter:
    """Ticks as `20%`."""
    return FuncFormatter(lambda value, _: f"{value:.0%}")


def set_bucket_ticks(axes: Axes, buckets: list[int], rows: dict[int, int] | None = None) -> None:
    """Label the x axis with buckets of context lengths.

    Args:
        buckets: Upper bound of each bucket in tokens; the bucket at index i stands at x = i.
        rows: Bucket → number of rows, shown below its bound.
    """
    labels = [f"{bucket:,}" for bucket in buckets]
    title = "context in tokens, up to"
    if rows is not None:
        labels = [f"{bucket:,}\n{rows[bucket]:,}" for bucket in buckets]
        title = f"{title} (below: rows)"
    axes.set_xticks(range(len(buckets)), labels)
    axes.set_xlim(-0.6, len(buckets) - 0.4)
    axes.set_xlabel(title)


def add_legend(axes: Axes) -> None:
    """Add a legend above the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles,
            labels,
            ncols=len(labels),
            fontsize=9,
            handlelength=1.2,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.1,
        )


def to_svg(figure: Figure, name: str, title: str) -> Markup:
    """The figure as an `<svg>` element.

    Args:
        name: Salt of the element ids, so that those of different plots in a page differ.
        title: Label for screen readers.
    """
    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=no_metadata, transparent=True)
    document = stream.getvalue()
    element = document[document.index("<svg") :].rstrip()
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return Markup(element.replace("<svg", label, 1))  # matplotlib escapes the text in it
