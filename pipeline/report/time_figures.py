"""Plots of a report over time and waves: throughput, engine utilization, context lengths."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pipeline.report import time_series
from pipeline.report.data import ReportData
from pipeline.report.drawing import (
    COLORS,
    PHASE_LABELS,
    Drawn,
    add_legend,
    scale_time,
    subplots,
    thousands_formatter,
    time_label,
)


def draw_throughput(data: ReportData) -> Drawn:
    """Tokens per second, and requests per minute by outcome."""
    if not data.num_rows:
        return Drawn("No row was written, so there is no throughput to show.")
    figure, (tokens_axes, requests_axes) = subplots(4.2, 2)
    edges = scale_time(data, time_series.bin_edges(data))
    tokens = time_series.rate_per_second(data, data.numbers("num_generated_tokens"))
    tokens_axes.stairs(tokens, edges, fill=True, color=COLORS["decode"])
    tokens_axes.set_ylabel("tokens per second")

    succeeded = 60 * time_series.rate_per_second(data, data.has_text.astype(float))
    failed = 60 * time_series.rate_per_second(data, (~data.has_text).astype(float))
    requests_axes.stairs(succeeded, edges, fill=True, color=COLORS["vision"], label="with a text")
    requests_axes.stairs(
        succeeded + failed,
        edges,
        baseline=succeeded,
        fill=True,
        color=COLORS["error"],
        label="failed",
    )
    requests_axes.set_ylabel("requests per minute")
    requests_axes.set_xlabel(time_label(data))
    add_legend(requests_axes)
    caption = (
        "Long contexts go first, so both should climb towards the end of a run. A gap is an engine "
        "that starts, or one that waits for frames; failures at the very beginning were found from "
        "headers."
    )
    return Drawn(caption, figure)


def draw_utilization(data: ReportData) -> Drawn:
    """Share of the engines' time by phase, and bytes of frames in flight."""
    if not data.engine_seconds.sum():
        return Drawn("No request reached an engine, so none was busy.")
    figure, (busy_axes, frames_axes) = subplots(4.2, 2)
    edges = scale_time(data, time_series.bin_edges(data))
    stacked = np.zeros(len(edges) - 1)
    for phase, share in time_series.utilization(data).items():
        busy_axes.stairs(
            stacked + share,
            edges,
            baseline=stacked,
            fill=True,
            color=COLORS[phase],
            label=PHASE_LABELS[phase],
        )
        stacked = stacked + share
    busy_axes.stairs(
        np.maximum(stacked, 1),
        edges,
        baseline=stacked,
        fill=True,
        color=COLORS["idle"],
        label=PHASE_LABELS["idle"],
    )
    busy_axes.set_ylabel("share of the time")
    busy_axes.set_ylim(0, max(1.0, stacked.max()))
    add_legend(busy_axes)
    _draw_frame_bytes(data, frames_axes)
    frames_axes.set_xlabel(time_label(data))
    caption = (
        f"Engines worked {data.utilization:.0%} of the time in which a run was under way, start-up "
        "included. Idle with few bytes of frames in flight: decoding of videos is too slow. Idle "
        "with many: the engine is starting, or gone. Work is known when its row is finished and is "
        "drawn as late as possible, so the left edge of a block is approximate."
    )
    return Drawn(caption, figure)


def _draw_frame_bytes(data: ReportData, axes: Axes) -> None:
    """Bytes of frames in flight of each run, and their limit."""
    label: str | None = "frames decoding or decoded"
    for run in data.runs:
        if run.samples:
            seconds = np.array([sample.second for sample in run.samples], float)
            frame_bytes = np.array([sample.frame_bytes for sample in run.samples], float)
            axes.fill_between(
                scale_time(data, seconds + run.start_time - data.start_time),
                frame_bytes / 1e6,
                step="post",
                color=COLORS["vision"],
                label=label,
                linewidth=0,
            )
            label = None  # one entry in the legend for all runs
    limits = [run.about.get("max_bytes_in_flight") or 0 for run in data.runs]
    limit = max(limits, default=0) / 1e6
    top = axes.get_ylim()[1]
    # a limit far above the data would flatten the data
    if 0 < limit < 4 * top:
        axes.axhline(limit, color=COLORS["error"], linewidth=1, label="bound")
    axes.set_ylabel(f"MB of frames\n(bound {limit:,.0f})" if limit else "MB of frames")
    axes.set_ylim(bottom=0)
    add_legend(axes)


def draw_waves(data: ReportData) -> Drawn:
    """Context lengths and number of requests, wave by wave."""
    waves = [wave for run in data.runs for wave in run.waves]
    if not waves and data.runs:
        return Drawn("No wave was given to an engine, so waves cannot be shown.")
    if not waves:
        return Drawn("No run left a record of its waves, so they cannot be shown.")
    figure, (context_axes, requests_axes) = subplots(3.8, 2)
    number = np.arange(1, len(waves) + 1)
    min_context = np.array([wave.min_context for wave in waves], float)
    max_context = np.array([wave.max_context for wave in waves], float)
    # a wave of equal contexts would have no height and be invisible
    height = np.maximum(max_context - min_context, 0.02 * max_context)
    width = 0.8 if len(waves) <= 100 else 1.0
    context_axes.bar(number, height, width, bottom=min_context, color=COLORS["decode"])
    context_axes.set_ylabel("context, tokens")
    context_axes.set_yscale("log", base=2)
    context_axes.set_ylim(0.8 * min_context.min(), 1.25 * max_context.max())
    context_axes.yaxis.set_major_formatter(thousands_formatter())

    requests = [wave.requests for wave in waves]
    requests_axes.bar(number, requests, width, color=COLORS["vision"])
    requests_axes.set_ylabel("requests")
    merged = max(run.merged for run in data.runs)
    requests_axes.set_xlabel("wave" if merged == 1 else f"waves, {merged} to a bar")
    requests_axes.set_xlim(0.4, max(len(waves), 8) + 0.6)
    requests_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    caption = (
        "Each bar spans a wave's shortest to longest context. Short bars that step down are good: "
        "rows that share a batch are alike. A tall bar wastes slots, unless it is the last, which "
        "takes what is left over."
    )
    return Drawn(caption, figure)
