"""The plots of a report in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from pipeline.formatting import format_number, shorten
from pipeline.report import bucket_figures, time_figures
from pipeline.report.data import ReportData
from pipeline.report.drawing import (
    COLORS,
    MAX_LABEL,
    PHASE_LABELS,
    STYLE,
    Drawn,
    Plot,
    add_legend,
    subplots,
    to_svg,
)


class PlotSpec(NamedTuple):
    name: str
    title: str
    draw: Callable[[ReportData], Drawn]


def plots(data: ReportData) -> list[Plot]:
    """All plots; those without data say why they are missing."""
    specs = (
        PlotSpec("throughput", "Throughput over time", time_figures.draw_throughput),
        PlotSpec("engine", "Engine busy and idle", time_figures.draw_utilization),
        PlotSpec("waves", "Context lengths against waves", time_figures.draw_waves),
        PlotSpec(
            "acceptance", "Acceptance by bucket of context length", bucket_figures.draw_acceptance
        ),
        PlotSpec("speedup", "Speed-up against its bound", bucket_figures.draw_speedup),
        PlotSpec("phases", "Shares of vision, prefill and decoding", bucket_figures.draw_phases),
        PlotSpec("failures", "Failures by code", draw_failures),
        PlotSpec("cost", "Cost", draw_cost),
    )
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        return [_plot(spec, data) for spec in specs]


def _plot(spec: PlotSpec, data: ReportData) -> Plot:
    drawn = spec.draw(data)
    svg = Markup("")
    if drawn.figure is not None:
        svg = to_svg(drawn.figure, spec.name, spec.title)
    return Plot(name=spec.name, title=spec.title, caption=drawn.caption, svg=svg)


def draw_failures(data: ReportData) -> Drawn:
    """Error rows by code."""
    rows_by_code = data.errors_by_code
    if not rows_by_code:
        return Drawn("No request failed.")
    figure, (axes,) = subplots(0.7 + 0.34 * len(rows_by_code), 1)
    # bars are drawn from the bottom: the most frequent code comes last
    codes = list(reversed(rows_by_code))
    counts = [rows_by_code[code] for code in codes]
    labels = [shorten(code, MAX_LABEL) for code in codes]
    bars = axes.barh(labels, counts, color=COLORS["error"])
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=3)
    axes.set_xlim(0, 1.15 * max(counts))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("requests")
    caption = (
        "Codes about files (not_a_video, truncated_file, ...) are the archive's; storage_error, "
        "worker_killed, engine_timeout and out_of_memory are the cluster's and worth a run with "
        "--retry-failed; context_too_long needs fewer or smaller frames."
    )
    return Drawn(caption, figure)


def draw_cost(data: ReportData) -> Drawn:
    """Cost of the machines, by phase of the engines' work."""
    if data.price_per_hour is None or data.total_cost is None:
        return Drawn(
            "No price was given; with --price-per-hour the page shows what the captions cost."
        )
    cost_per_second = data.price_per_hour / data.num_engines / 3600
    costs = {
        phase: float(seconds.sum()) * cost_per_second
        for phase, seconds in data.phase_seconds.items()
    }
    costs["idle"] = max(data.total_cost - sum(costs.values()), 0.0)
    figure, (axes,) = subplots(1.5, 1)
    left = 0.0
    for phase, cost in costs.items():
        label = f"{PHASE_LABELS[phase]} {format_number(cost)}"
        axes.barh(["cost"], cost, left=left, color=COLORS[phase], label=label)
        left += cost
    axes.set_xlim(0, left or 1)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("in the currency of the price")
    add_legend(axes)
    hours = format_number(data.running_seconds / 3600)
    caption = (
        f"{hours} hours at {format_number(data.price_per_hour)} an hour. Idle is all time in which "
        "no engine worked: start-up, waiting for frames, and the last minutes of a run if some "
        "engines have no requests left."
    )
    return Drawn(caption, figure)
