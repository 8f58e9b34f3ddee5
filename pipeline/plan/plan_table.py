"""The report of a dry run as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.records import FailedRequest

BAR_WIDTH = 40  # characters
MAX_LINES = 20  # of waves, and of failures


def table(plan: dict[str, Any], failed: Sequence[FailedRequest]) -> str:
    """A report by `dryrun.report`, and the failures it counts, as lines of text."""
    bound = "" if plan["exact"] else " at most, since some containers carry no frame count"
    lines = [
        f"{plan['requests']} requests on {plan['videos']} videos, "
        f"{plan['hours']:.2f} hours of footage, {plan['frames']} frames to decode",
        f"{plan['context_tokens']} tokens of context, "
        f"{plan['visual_tokens']} of them visual{bound}",
        "",
        "context length",
        *_histogram_lines(plan["contexts"]),
        "",
        f"{len(plan['waves'])} waves",
        *(_wave_line(wave) for wave in plan["waves"][:MAX_LINES]),
    ]
    if len(plan["waves"]) > MAX_LINES:
        lines.append(f"{'…':>8} and {len(plan['waves']) - MAX_LINES} more")
    if "buckets" in plan:
        lines += ["", *_prediction_lines(plan)]
    lines += ["", f"{len(failed)} requests will fail" if failed else "no failure is foreseen"]
    lines += [f"  {failure.error.code}: {failure.error.message}" for failure in failed[:MAX_LINES]]
    if len(failed) > MAX_LINES:
        lines.append(f"  … and {len(failed) - MAX_LINES} more: {plan['failures']}")
    return "\n".join(lines)


def _histogram_lines(contexts: dict[str, int]) -> list[str]:
    largest = max(contexts.values(), default=1)
    return [
        f"{'up to ' + bound:>16} {'█' * max(1, count * BAR_WIDTH // largest)} {count}"
        for bound, count in contexts.items()
    ]


def _wave_line(wave: dict[str, Any]) -> str:
    line = f"{wave['requests']:>8} requests of {wave['shortest']} to {wave['longest']} tokens"
    if "draft" in wave:
        line += f", {wave['slots']} at a time, {wave['draft']}"
    return line


def _prediction_lines(plan: dict[str, Any]) -> list[str]:
    lines = []
    for bound, bucket in plan["buckets"].items():
        lines += _bucket_lines(bound, bucket)
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in plan["shares"].items())
    lines += [
        "",
        plan["figures"],
        f"{_range(plan['engine_hours'])} engine hours on {plan['device']}: {shares}",
    ]
    if "cost" in plan:
        lines.append(f"cost {_range(plan['cost'])}")
    for name, hours in plan["engine_hours_elsewhere"].items():
        text = "too small" if hours is None else f"{_range(hours)} hours, by its data sheet"
        lines.append(f"{name:>16} {text}")
    return lines


def _bucket_lines(bound: str, bucket: dict[str, Any]) -> list[str]:
    slots = ", ".join(map(str, bucket["slots"]))
    memory = ", ".join(f"{name} {size:g}" for name, size in bucket["memory_gb"].items() if size)
    return [
        f"up to {bound} tokens: slots {slots}; fewer entries save more than half of the channels "
        f"from {bucket['crossover']} tokens on; GB: {memory}",
        f"{'draft':>28} {'slots':>5} {'accepts':>7} {'MB/token':>9} {'bound':>6} "
        f"{'s/request':>9} {'gain':>5}",
        *(_option_line(option) for option in bucket["candidates"]),
    ]


def _option_line(option: dict[str, Any]) -> str:
    return (
        f"{option['draft'] + _gamma_range(option['gammas']):>28} {option['slots']:>5} "
        f"{option['acceptance']:>7.2f} {option['mb_per_token']:>9.1f} {option['bound']:>6.2f} "
        f"{option['seconds']:>9.3f} {option['gain']:>5.2f}"
    )


def _gamma_range(gammas: Sequence[int]) -> str:
    """The least and the largest γ of a wave's rounds; empty if γ is the same in all."""
    return " ({}–{})".format(*gammas) if gammas else ""


def _range(values: Sequence[float]) -> str:
    low, expected, high = values
    return f"{expected:g} ({low:g} to {high:g})"
