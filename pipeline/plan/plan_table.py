"""The report of a dry run as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.formatting import format_count, format_duration, format_number
from pipeline.records import FailedRequest

BAR_WIDTH = 40  # characters
MAX_LINES = 20  # of waves, and of failures
# of `memory_breakdown`, as an operator calls them
MEMORY_NAMES = {"kv": "KV cache", "draft_kv": "draft's KV cache", "graphs": "CUDA graphs"}


def table(plan: dict[str, Any], failed: Sequence[FailedRequest]) -> str:
    """A report by `dryrun.report`, and the failures it counts, as lines of text."""
    bound = "" if plan["exact"] else " at most, since some containers carry no frame count"
    lines = [
        f"{format_count(plan['requests'], 'request')} on {format_count(plan['videos'], 'video')}: "
        f"{format_duration(plan['hours'] * 3600)} of footage, "
        f"{format_count(plan['frames'], 'frame')} to decode",
        f"{format_count(plan['context_tokens'], 'token')} of context, "
        f"{plan['visual_tokens']:,} of them visual{bound}",
        "",
        "requests by context length, in tokens",
        *_histogram_lines(plan["contexts"]),
        "",
        format_count(len(plan["waves"]), "wave"),
        *(_wave_line(wave) for wave in plan["waves"][:MAX_LINES]),
    ]
    if len(plan["waves"]) > MAX_LINES:
        lines.append(f"{'…':>8} and {len(plan['waves']) - MAX_LINES:,} more")
    if "buckets" in plan:
        lines += ["", *_prediction_lines(plan)]
    lines += ["", *_failure_lines(plan, failed)]
    return "\n".join(lines)


def _histogram_lines(contexts: dict[str, int]) -> list[str]:
    largest = max(contexts.values(), default=1)
    return [
        f"{'up to ' + format(int(bound), ','):>16} "
        f"{'█' * max(1, count * BAR_WIDTH // largest)} {count:,}"
        for bound, count in contexts.items()
    ]


def _wave_line(wave: dict[str, Any]) -> str:
    lengths = f"{wave['shortest']:,} to {wave['longest']:,}"
    if wave["shortest"] == wave["longest"]:
        lengths = f"{wave['longest']:,}"
    line = f"  {format_count(wave['requests'], 'request')} of {lengths} tokens"
    if "draft" in wave:
        line += f", {wave['slots']} at a time, {wave['draft']}"
    return line


def _failure_lines(plan: dict[str, Any], failed: Sequence[FailedRequest]) -> list[str]:
    if not failed:
        return ["no request is expected to fail"]
    lines = [f"{format_count(len(failed), 'request')} will fail"]
    lines += [f"  {failure.error.code}: {failure.error.message}" for failure in failed[:MAX_LINES]]
    if len(failed) > MAX_LINES:
        by_code = ", ".join(f"{code} {count:,}" for code, count in plan["failures"].items())
        lines.append(f"  … and {len(failed) - MAX_LINES:,} more; in all {by_code}")
    return lines


# ------------------------------------------------------------------------------------- predictions


def _prediction_lines(plan: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for bound, bucket in plan["buckets"].items():
        lines += [*_bucket_lines(int(bound), bucket), ""]
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in plan["shares"].items())
    lines += [
        plan["figures"],
        f"one engine on {plan['device']} takes {_duration_range(plan['engine_hours'])}: {shares}",
    ]
    if "cost" in plan:
        low, expected, high = (f"{value:,.2f}" for value in plan["cost"])
        cost = expected if low == high else f"{expected} ({low} to {high})"
        lines.append(f"cost: {cost}, in the currency of --price-per-hour")
    lines.append("one engine elsewhere, by data sheets and in bfloat16:")
    for name, hours in plan["engine_hours_elsewhere"].items():
        lines.append(f"{name:>16} {'too small' if hours is None else _duration_range(hours)}")
    return lines


def _bucket_lines(bound: int, bucket: dict[str, Any]) -> list[str]:
    slots = " or ".join(map(str, bucket["slots"]))
    memory = [
        f"{MEMORY_NAMES.get(name, name.replace('_', ' '))} {_memory_text(size)}"
        for name, size in bucket["memory_gb"].items()
        if size
    ]
    return [
        f"waves of up to {bound:,} tokens, {slots} at a time",
        f"  {bucket['reason']}",
        f"{'draft':>28} {'slots':>5} {'accepts':>7} {'MB/token':>9} {'bound':>6} "
        f"{'s/request':>9} {'gain':>5}",
        *(_option_line(option) for option in bucket["candidates"]),
        f"  a fifth of the KV entries saves more bytes than half of the input channels from "
        f"{format_count(bucket['crossover'], 'token')} of context on",
        f"  memory: {', '.join(memory)}",
    ]


def _option_line(option: dict[str, Any]) -> str:
    accepts = f"{option['acceptance']:.2f}" if option["draft"] != "dense" else ""
    return (
        f"{option['draft'] + _gamma_range(option['gammas']):>28} {option['slots']:>5} "
        f"{accepts:>7} {option['mb_per_token']:>9.1f} {option['bound']:>6.2f} "
        f"{option['seconds']:>9.3f} {option['gain']:>5.2f}"
    )


def _gamma_range(gammas: Sequence[int]) -> str:
    """The least and the largest γ of a wave's rounds; empty if γ is the same in all."""
    return " ({}–{})".format(*gammas) if gammas else ""


def _memory_text(gigabytes: float) -> str:
    if gigabytes >= 1:
        return f"{format_number(gigabytes)} GB"
    return f"{format_number(1000 * gigabytes)} MB"


def _duration_range(hours: Sequence[float]) -> str:
    """An expected duration with its bounds, from lower bound, expected value and upper bound."""
    low, expected, high = (_duration(value * 3600) for value in hours)
    return expected if low == high else f"{expected} ({low} to {high})"


def _duration(seconds: float) -> str:
    return "less than 1 s" if seconds < 1 else format_duration(seconds)
