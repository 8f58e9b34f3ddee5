"""A report's plots: what each shows, and what to look for in it."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.report import data as data
from pipeline.report.data import ReportData
from pipeline.report.drawing import (
    COLOURS,
    DRAFTS,
    NAMES,
    STYLE,
    Plot,
    class_ticks,
    legend,
    panels,
    short,
    svg,
    thousands,
    times,
)
from pipeline.report.monitor import number as said
from pipeline.report.runs import SAMPLE


def plots(facts: ReportData) -> list[Plot]:
    """All that the facts allow, in the order of the page."""
    draw = (throughput, engine, waves, acceptance, speedup, phases, failures, cost)
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        return [one(facts) for one in draw]


# ---------------------------------------------------------------------------------------- over time


def throughput(facts: ReportData) -> Plot:
    """Tokens a second, and requests a minute by what became of them."""
    name = "throughput"
    title = "Throughput over time"
    if not facts.table.num_rows:
        return Plot(name, title, "No row was written, so there is no throughput to show.")
    figure, (upper, lower) = panels(4.2, 2)
    at, unit = times(facts, data.edges(facts))
    upper.stairs(
        data.per_second(facts, facts.real("num_generated_tokens")),
        at,
        fill=True,
        color=COLOURS["decode"],
    )
    upper.set_ylabel("tokens per second")
    done, failed = (
        60 * data.per_second(facts, mask.astype(float)) for mask in (facts.good, ~facts.good)
    )
    lower.stairs(done, at, fill=True, color=COLOURS["vision"], label="with a text")
    lower.stairs(
        done + failed, at, baseline=done, fill=True, color=COLOURS["error"], label="failed"
    )
    lower.set_ylabel("requests per minute")
    lower.set_xlabel(unit)
    legend(lower)
    look = (
        "Long contexts go first, so both should climb towards the end of a run. A gap is an engine that starts, or one "
        "that waits for frames; failures at the very beginning were found from headers."
    )
    return Plot(name, title, look, svg(figure, name))


def engine(facts: ReportData) -> Plot:
    """Busy and idle, and the frames that wait."""
    name = "engine"
    title = "Engine busy and idle"
    if not facts.engine_s.sum():
        return Plot(name, title, "No request reached an engine, so none was busy.")
    figure, (upper, lower) = panels(4.2, 2)
    at, unit = times(facts, data.edges(facts))
    below = np.zeros(len(at) - 1)
    for phase, share in zip(data.PHASES, data.busy(facts), strict=True):
        upper.stairs(
            below + share, at, baseline=below, fill=True, color=COLOURS[phase], label=NAMES[phase]
        )
        below = below + share
    upper.stairs(
        np.maximum(below, 1), at, baseline=below, fill=True, color=COLOURS["idle"], label="idle"
    )
    upper.set_ylabel("share of the time")
    upper.set_ylim(0, max(1.0, below.max()))
    legend(upper)
    _frames(facts, lower)
    lower.set_xlabel(unit)
    whole = facts.engine_s.sum() / facts.engines / facts.running
    look = (
        f"Engines worked {whole:.0%} of the time in which a run was under way, start-up included. Idle while few bytes "
        "of frames are held: decoding is too slow. Idle while many are: the engine is starting, or gone. Work is known "
        "when its row is finished and is drawn as late as it can have been, so the left edge of a block is soft."
    )
    return Plot(name, title, look, svg(figure, name))


def _frames(facts: ReportData, axes: Axes) -> None:
    """Bytes of frames in flight, of each run, and how many there may be."""
    for number, run in enumerate(facts.runs):
        samples = np.array(run.samples, float).reshape(-1, len(SAMPLE))
        if samples.size:
            at, _ = times(facts, samples[:, 0] + run.began - facts.began)
            label = "frames decoding or held" if not number else None
            axes.fill_between(
                at,
                samples[:, 7] / 1e6,
                step="post",
                color=COLOURS["vision"],
                label=label,
                linewidth=0,
            )
    bound = max((run.about.get("max_bytes_in_flight") or 0 for run in facts.runs), default=0) / 1e6
    most = axes.get_ylim()[1]
    if 0 < bound < 4 * most:
        axes.axhline(bound, color=COLOURS["error"], linewidth=1, label="bound")
    axes.set_ylabel("MB of frames" + (f"\n(bound {bound:,.0f})" if bound else ""))
    axes.set_ylim(bottom=0)
    legend(axes)


def waves(facts: ReportData) -> Plot:
    """Context lengths, wave by wave."""
    name = "waves"
    title = "Context lengths against waves"
    found = np.array([wave for run in facts.runs for wave in run.waves], float)
    if not found.size:
        why = (
            "No run left a record of its waves"
            if not facts.runs
            else "No wave was handed to an engine"
        )
        return Plot(name, title, f"{why}, so they cannot be shown.")
    figure, (upper, lower) = panels(3.8, 2)
    number = np.arange(1, len(found) + 1)
    shortest = found[:, 3]
    longest = found[:, 4]
    height = np.maximum(longest - shortest, 0.02 * longest)  # so that a wave of equals is seen
    width = 0.8 if len(found) <= 100 else 1.0
    upper.bar(number, height, width, bottom=shortest, color=COLOURS["decode"])
    upper.set_ylabel("context, tokens")
    upper.set_yscale("log", base=2)
    upper.set_ylim(0.8 * shortest.min(), 1.25 * longest.max())
    upper.yaxis.set_major_formatter(thousands())
    lower.bar(number, found[:, 2], width, color=COLOURS["vision"])
    lower.set_ylabel("requests")
    merged = max(run.merged for run in facts.runs)
    lower.set_xlabel("wave" if merged == 1 else f"waves, {merged} to a bar")
    lower.set_xlim(0.4, max(len(found), 8) + 0.6)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    look = (
        "Each bar spans a wave's shortest to longest context. Short bars that step down are good: rows that share a "
        "batch are alike. A tall bar wastes slots, unless it is the last, which takes what is left over."
    )
    return Plot(name, title, look, svg(figure, name))


# --------------------------------------------------------------------------------------- by context


def acceptance(facts: ReportData) -> Plot:
    """Accepted share of the drafted tokens, by class of context lengths."""
    name = "acceptance"
    title = "Acceptance by bucket of context length"
    found = [bucket for bucket in data.buckets(facts) if bucket.proposed]
    if not found:
        return Plot(name, title, "No token was drafted, so none could be accepted.")
    figure, (axes,) = panels(2.8, 1)
    classes = sorted({bucket.longest for bucket in found})
    drafts = sorted({bucket.draft for bucket in found})
    for number, draft in enumerate(drafts):
        own = [bucket for bucket in found if bucket.draft == draft]
        at = np.array([classes.index(b.longest) for b in own]) + 0.08 * (
            number - (len(drafts) - 1) / 2
        )
        share = [b.acceptance for b in own]
        error = [b.error for b in own]
        colour = DRAFTS[number % len(DRAFTS)]
        axes.errorbar(
            at, share, error, color=colour, marker="o", capsize=3, label=short(draft) or "unnamed"
        )
        for x, bucket in zip(at, own, strict=True):
            note = f"{bucket.accepted / bucket.rounds:.2f}"
            above = bucket.acceptance + bucket.error
            axes.annotate(
                note,
                (x, above),
                (0, 5),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontsize=9,
            )
    axes.set_ylim(0, 1.2)
    axes.set_ylabel("accepted share of drafted tokens")
    class_ticks(axes, classes, {c: sum(b.rows for b in found if b.longest == c) for c in classes})
    legend(axes)
    look = (
        "A level line means that the draft's selection holds at every length. One that falls to the right asks for "
        "more kept entries (--keep) or fewer drafted tokens (--gamma) on long contexts. Numbers are tokens accepted "
        "per round, whiskers standard errors between rows."
    )
    return Plot(name, title, look, svg(figure, name))


def speedup(facts: ReportData) -> Plot:
    """What drafting gained over dense decoding, against what it could gain at most."""
    name = "speedup"
    title = "Speed-up against its bound"
    found = data.buckets(facts)
    pairs = data.speedups(found)
    if not pairs:
        return Plot(name, title, _no_speedup(found))
    figure, (axes,) = panels(2.8, 1)
    at = np.arange(len(pairs))
    axes.bar(
        at,
        [bound for _, _, bound in pairs],
        0.7,
        color=COLOURS["idle"],
        label="bound: tokens per pass",
    )
    axes.bar(at, [gain for _, gain, _ in pairs], 0.4, color=COLOURS["decode"], label="measured")
    axes.axhline(1, color=COLOURS["error"], linewidth=1)
    for x, (_, gain, bound) in zip(at, pairs, strict=True):
        axes.annotate(
            f"{gain:.2f}× of {bound:.2f}×",
            (x, bound),
            (0, 3),
            textcoords="offset points",
            ha="center",
        )
    axes.set_ylabel("times dense decoding")
    axes.set_ylim(0, 1.3 * max(max(gain, bound) for _, gain, bound in pairs))
    class_ticks(axes, [context for context, _, _ in pairs])
    legend(axes)
    look = (
        "Decoding speed (tokens per second of the rows' decoding time) with a draft over that of the rows decoded "
        "densely in the same class of lengths. Below the red line drafting costs more than it gains there. The bound "
        "is what it would be if drafting were free and verifying several tokens cost no more than writing one."
    )
    return Plot(name, title, look, svg(figure, name))


def _no_speedup(found: list[data.Bucket]) -> str:
    rounds = sum(bucket.rounds for bucket in found if bucket.proposed)
    if not rounds:
        return "No token was drafted, so there is no speed-up to show."
    bound = (sum(b.accepted for b in found if b.proposed) + rounds) / rounds
    return (
        "These rows cannot tell the speed-up: none with a context of like length was decoded densely (--mode dense), "
        f"and without that there is nothing to compare with. It cannot be more than {bound:.2f}×, the tokens that a "
        "pass of the full model yields."
    )


def phases(facts: ReportData) -> Plot:
    """Where the engine's time went, by class of context lengths."""
    name = "phases"
    title = "Shares of vision, prefill and decoding"
    found = data.buckets(facts)
    classes = sorted({bucket.longest for bucket in found if sum(bucket.seconds)})
    if not classes:
        return Plot(name, title, "No request took an engine's time, so there are no shares.")
    seconds = np.array(
        [np.sum([b.seconds for b in found if b.longest == c], axis=0) for c in classes]
    )
    labels = [*(f"up to {c:,}" for c in classes), "all"]
    seconds = np.vstack([seconds, seconds.sum(0)])
    figure, (axes,) = panels(0.9 + 0.36 * len(labels), 1)
    left = np.zeros(len(labels))
    for phase, share in zip(data.PHASES, (seconds / seconds.sum(1, keepdims=True)).T, strict=True):
        axes.barh(labels, share, left=left, color=COLOURS[phase], label=NAMES[phase])
        for y, (x, part) in enumerate(zip(left, share, strict=True)):
            if part >= 0.06:
                axes.text(
                    x + part / 2,
                    y,
                    f"{part:.0%}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                )
        left = left + share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylabel("context, tokens")
    axes.grid(axis="y", visible=False)
    legend(axes)
    look = (
        "Drafting can only shorten the decoding part. Where vision and prefill lead, ask several questions per video "
        "in one job (each video is seen and prefilled once), or look at fewer or smaller frames (--fps, --max-pixels)."
    )
    return Plot(name, title, look, svg(figure, name))


# ----------------------------------------------------------------------------------- failures, cost


def failures(facts: ReportData) -> Plot:
    """Error rows by code."""
    name = "failures"
    title = "Failures by code"
    found = facts.failures
    if not found:
        return Plot(name, title, "No request failed.")
    figure, (axes,) = panels(0.7 + 0.34 * len(found), 1)
    codes = list(found)[::-1]
    counts = list(found.values())[::-1]
    bars = axes.barh([short(code) for code in codes], counts, color=COLOURS["error"])
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=3)
    axes.set_xlim(0, 1.15 * max(counts))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("requests")
    look = (
        "Codes about files (not_a_video, truncated_file, ...) are the archive's; storage_error, worker_killed, "
        "engine_timeout and out_of_memory are the cluster's and worth a run with --retry-failed; context_too_long asks "
        "for fewer or smaller frames."
    )
    return Plot(name, title, look, svg(figure, name))


def cost(facts: ReportData) -> Plot:
    """What the machines' hours were spent on."""
    name = "cost"
    title = "Cost"
    if facts.price is None:
        return Plot(
            name,
            title,
            "No price was given; with --price-per-hour the page tells what the captions cost.",
        )
    whole = facts.price * facts.running / 3600
    worked = facts.price * facts.engine_s.sum(1) / facts.engines / 3600
    parts = {**dict(zip(data.PHASES, worked, strict=True)), "idle": max(whole - worked.sum(), 0.0)}
    figure, (axes,) = panels(1.5, 1)
    left = 0.0
    for phase, money in parts.items():
        axes.barh(
            ["cost"], money, left=left, color=COLOURS[phase], label=f"{NAMES[phase]} {said(money)}"
        )
        left += money
    axes.set_xlim(0, left or 1)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("in the currency of the price")
    legend(axes)
    look = (
        f"{said(facts.running / 3600)} hours at {said(facts.price)} an hour. Idle is all time in which no engine "
        "worked: start-up, waiting for frames, and runs' last minutes if some engines have nothing left."
    )
    return Plot(name, title, look, svg(figure, name))
