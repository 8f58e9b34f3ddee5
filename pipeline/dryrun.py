"""What a run would be, from headers alone: counts, hours, tokens, waves, and which requests would fail and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.prepare import Failed
from pipeline.types import Wave

BAR = 40  # characters


def report(waves: Sequence[Wave], failed: Sequence[Failed]) -> dict[str, Any]:
    """The plan as one JSON object; `contexts` counts requests by context length, in classes that double."""
    requests = [r for wave in waves for r in wave.requests]
    infos = {r.info.uri: r.info for r in requests}
    plans = {r.footage: r.plan for r in requests}
    videos = infos.keys() | {f.pending.item.video_uri for f in failed}
    return {
        "requests": len(requests) + len(failed),
        "videos": len(videos),
        "hours": round(sum(info.duration for info in infos.values()) / 3600, 4),
        "frames": sum(len(p.times) for p in plans.values()),
        "context_tokens": sum(r.context for r in requests),
        "visual_tokens": sum(r.plan.tokens for r in requests),
        "exact": all(info.exact for info in infos.values()),
        "waves": [_wave(wave) for wave in waves],
        "contexts": _histogram([r.context for r in requests]),
        "errors": len(failed),
        "failures": dict(Counter(f.error.code for f in failed)),
    }


def _wave(wave: Wave) -> dict[str, int]:
    contexts = [request.context for request in wave.requests]
    return {"requests": len(contexts), "shortest": min(contexts), "longest": max(contexts)}


def _histogram(contexts: Sequence[int]) -> dict[str, int]:
    """Upper bound of a class → requests in it."""
    counts = Counter(max(1, (context - 1).bit_length()) for context in contexts)
    return {str(2**bits): counts[bits] for bits in sorted(counts)}


def table(plan: dict[str, Any], failed: Sequence[Failed]) -> str:
    """The report for people."""
    bound = "" if plan["exact"] else " at most, since some containers carry no frame count"
    lines = [
        f"{plan['requests']} requests on {plan['videos']} videos, {plan['hours']:.2f} hours of footage, "
        f"{plan['frames']} frames to decode",
        f"{plan['context_tokens']} tokens of context, {plan['visual_tokens']} of them visual{bound}",
        "",
        "context length",
        *_bars(plan["contexts"]),
        "",
        f"{len(plan['waves'])} waves",
        *(f"{w['requests']:>8} requests of {w['shortest']} to {w['longest']} tokens" for w in plan["waves"][:20]),
    ]
    if len(plan["waves"]) > 20:
        lines.append(f"{'…':>8} and {len(plan['waves']) - 20} more")
    lines += ["", f"{len(failed)} requests will fail" if failed else "no failure is foreseen"]
    lines += [f"  {f.error.code}: {f.error.message}" for f in failed[:20]]
    if len(failed) > 20:
        lines.append(f"  … and {len(failed) - 20} more: {plan['failures']}")
    return "\n".join(lines)


def _bars(contexts: dict[str, int]) -> list[str]:
    most = max(contexts.values(), default=1)
    return [f"{'up to ' + bound:>16} {'█' * max(1, count * BAR // most)} {count}" for bound, count in contexts.items()]
