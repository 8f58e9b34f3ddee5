"""How a report's plots look, and how they become SVG that can stand in a page: no script, no
reference to anything outside, text as text."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter

from pipeline.report.data import ReportData

INK = "#33404d"
GRID = "#d9dfe5"
COLOURS = {
    "vision": "#4e9a8f",
    "prefill": "#e0a43c",
    "decode": "#3f6fb5",
    "idle": "#e6eaee",
    "error": "#c0504d",
}
DRAFTS = ("#3f6fb5", "#4e9a8f", "#b5618f", "#8a7a3c", "#6d6d6d")
NAMES = {"vision": "vision", "prefill": "prefill", "decode": "decoding", "idle": "idle"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "text.parse_math": False,  # a `$` in a name is a dollar
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


@dataclass(frozen=True)
class Plot:
    """A plot and what to look for in it; without `svg`, `look` says why there is none."""

    name: str
    title: str
    look: str
    svg: str = ""


def panels(height: float, rows: int) -> tuple[Figure, tuple[Any, ...]]:
    """A figure with its axes one below the other, on one time or wave axis."""
    figure = Figure((7.6, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, tuple(axes[:, 0])


def times(facts: ReportData, seconds: np.ndarray) -> tuple[np.ndarray, str]:
    """Times in a unit that fits, and the axis' label."""
    when = datetime.fromtimestamp(facts.began, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    unit, length = (
        ("seconds", 1)
        if facts.span < 180
        else ("minutes", 60)
        if facts.span < 10_800
        else ("hours", 3600)
    )
    return seconds / length, f"{unit} since {when}"


def short(name: str) -> str:
    """A name that leaves room for what it names."""
    return name if len(name) <= 32 else name[:31] + "…"


def thousands() -> Formatter:
    """Ticks as 12,000."""
    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def class_ticks(axes: Axes, classes: list[int], rows: dict[int, int] | None = None) -> None:
    """Ticks of the classes of context lengths, with how many rows there are in each."""
    counts = {c: f"\n{count:,}" for c, count in (rows or {}).items()}
    axes.set_xticks(range(len(classes)), [f"{c:,}{counts.get(c, '')}" for c in classes])
    axes.set_xlim(-0.6, len(classes) - 0.4)
    axes.set_xlabel("context in tokens, up to" + (" (below: rows)" if rows else ""))


def legend(axes: Axes) -> None:
    """Above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        place: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.0),
            "borderaxespad": 0.1,
        }
        axes.legend(handles, labels, ncols=len(labels), fontsize=9, handlelength=1.2, **place)


def svg(figure: Figure, name: str) -> str:
    """The `<svg>` element alone; `name` keeps its ids apart from other plots'."""
    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=nothing, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :].rstrip()
