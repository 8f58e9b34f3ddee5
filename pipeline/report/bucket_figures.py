"""Plots of a report by bucket of context lengths: acceptance, speed-up, shares of the phases."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from pipeline.formatting import shorten
from pipeline.report.buckets import BucketStats, bucket_stats, speedups
from pipeline.report.data import ReportData
from pipeline.report.drawing import (
    COLORS,
    DRAFT_COLORS,
    MAX_LABEL,
    PHASE_LABELS,
    Drawn,
    add_legend,
    percent_formatter,
    set_bucket_ticks,
    subplots,
)
from pipeline.report.tally import PHASES

DRAFT_OFFSET = 0.08  # between the points of two drafts in one bucket, in buckets
MIN_LABELLED_SHARE = 0.06  # a smaller part of a bar has no room for its percentage


def draw_acceptance(data: ReportData) -> Drawn:
    """Accepted share of the drafted tokens."""
    drafted = [stats for stats in bucket_stats(data) if stats.proposed]
    if not drafted:
        return Drawn("No token was drafted, so none could be accepted.")
    figure, (axes,) = subplots(2.8, 1)
    rows_in_bucket = dict.fromkeys(sorted({stats.max_context for stats in drafted}), 0)
    for stats in drafted:
        rows_in_bucket[stats.max_context] += stats.rows
    buckets = list(rows_in_bucket)
    drafts = sorted({stats.draft for stats in drafted})
    for index, draft in enumerate(drafts):
        own = [stats for stats in drafted if stats.draft == draft]
        offset = DRAFT_OFFSET * (index - (len(drafts) - 1) / 2)
        positions = [buckets.index(stats.max_context) + offset for stats in own]
        _draw_draft(axes, positions, own, color=DRAFT_COLORS[index % len(DRAFT_COLORS)])
    axes.set_ylim(0, 1.2)
    axes.set_ylabel("accepted share of drafted tokens")
    set_bucket_ticks(axes, buckets, rows_in_bucket)
    add_legend(axes)
    caption = (
        "A level line means that the draft's selection holds at every length. One that falls to "
        "the right asks for more kept entries (--keep) or fewer drafted tokens (--gamma) on long "
        "contexts. Numbers are tokens accepted per round, whiskers standard errors between rows."
    )
    return Drawn(caption, figure)


def _draw_draft(axes: Axes, positions: list[float], drafted: list[BucketStats], color: str) -> None:
    """One draft's acceptance per bucket, with standard errors and tokens accepted per round."""
    axes.errorbar(
        positions,
        [stats.acceptance for stats in drafted],
        [stats.acceptance_error for stats in drafted],
        color=color,
        marker="o",
        capsize=3,
        label=shorten(drafted[0].draft, MAX_LABEL) or "unnamed",
    )
    for x, stats in zip(positions, drafted, strict=True):
        axes.annotate(
            f"{stats.accepted / stats.rounds:.2f}",
            xy=(x, stats.acceptance + stats.acceptance_error),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            color=color,
            fontsize=9,
        )


def draw_speedup(data: ReportData) -> Drawn:
    """Decoding speed with a draft over dense decoding, and its upper bound."""
    stats = bucket_stats(data)
    found = speedups(stats)
    if not found:
        return Drawn(_why_no_speedup(stats))
    figure, (axes,) = subplots(2.8, 1)
    positions = np.arange(len(found))
    bounds = [speedup.bound for speedup in found]
    measured = [speedup.measured for speedup in found]
    axes.bar(positions, bounds, 0.7, color=COLORS["idle"], label="bound: tokens per pass")
    axes.bar(positions, measured, 0.4, color=COLORS["decode"], label="measured")
    axes.axhline(1, color=COLORS["error"], linewidth=1)
    for x, speedup in zip(positions, found, strict=True):
        axes.annotate(
            f"{speedup.measured:.2f}× of {speedup.bound:.2f}×",
            xy=(x, speedup.bound),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
        )
    axes.set_ylabel("times dense decoding")
    axes.set_ylim(0, 1.3 * max(bounds + measured))
    set_bucket_ticks(axes, [speedup.max_context for speedup in found])
    add_legend(axes)
    caption = (
        "Decoding speed (tokens per second of the rows' decoding time) with a draft over that of "
        "the rows decoded densely in the same bucket of lengths. Below the red line drafting costs "
        "more than it gains. The bound is the speed-up if drafting were free and verifying several "
        "tokens cost no more than writing one."
    )
    return Drawn(caption, figure)


def _why_no_speedup(stats: list[BucketStats]) -> str:
    drafted = [one for one in stats if one.proposed]
    rounds = sum(one.rounds for one in drafted)
    if not rounds:
        return "No token was drafted, so there is no speed-up to show."
    bound = (sum(one.accepted for one in drafted) + rounds) / rounds
    return (
        "These rows cannot tell the speed-up: none with a context of like length was decoded "
        "densely (--mode dense), and without that there is nothing to compare with. It cannot be "
        f"more than {bound:.2f}×, the tokens that a pass of the full model yields."
    )


def draw_phases(data: ReportData) -> Drawn:
    """Shares of the phases in the engines' time."""
    seconds_in_bucket: dict[int, np.ndarray] = {}
    for stats in bucket_stats(data):
        if stats.engine_seconds:
            seconds = np.array([stats.phase_seconds[phase] for phase in PHASES])
            previous = seconds_in_bucket.get(stats.max_context, 0.0)
            seconds_in_bucket[stats.max_context] = previous + seconds
    if not seconds_in_bucket:
        return Drawn("No request took an engine's time, so there are no shares.")
    bars = {f"up to {bucket:,}": seconds for bucket, seconds in seconds_in_bucket.items()}
    bars["all"] = np.sum(list(seconds_in_bucket.values()), axis=0)
    labels = list(bars)
    seconds = np.stack(list(bars.values()))  # (bars, phases)
    shares = seconds / seconds.sum(1, keepdims=True)
    figure, (axes,) = subplots(0.9 + 0.36 * len(bars), 1)
    left = np.zeros(len(bars))
    for index, phase in enumerate(PHASES):
        share = shares[:, index]
        axes.barh(labels, share, left=left, color=COLORS[phase], label=PHASE_LABELS[phase])
        _label_shares(axes, left, share)
        left = left + share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(percent_formatter())
    axes.set_ylabel("context, tokens")
    axes.grid(axis="y", visible=False)
    add_legend(axes)
    caption = (
        "Drafting can only shorten the decoding part. Where vision and prefill lead, ask several "
        "questions per video in one job (each video is encoded and prefilled once), or use fewer "
        "or smaller frames (--fps, --max-pixels)."
    )
    return Drawn(caption, figure)


def _label_shares(axes: Axes, left: np.ndarray, shares: np.ndarray) -> None:
    """Write the percentages into the parts of horizontal bars that are wide enough."""
    for bar, (start, share) in enumerate(zip(left, shares, strict=True)):
        if share >= MIN_LABELLED_SHARE:
            axes.text(
                start + share / 2,
                bar,
                f"{share:.0%}",
                ha="center",
                va="center",
                color="white",
                fontsize=9,
            )
