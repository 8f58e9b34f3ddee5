"""What a run would be, from headers alone: counts, tokens, waves with their drafts and why, hours
here and on devices that are known by their data sheets, cost, and which requests would fail and
why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.plan.choose import choose
from pipeline.plan.history import History
from pipeline.plan.profile_file import provenance
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import (
    DraftOption,
    FailedRequest,
    Wave,
)
from std_core.cost_model.crossover import crossover_context
from std_core.cost_model.device_specs import QUOTED_DEVICES, estimated_profile, published_device
from std_core.cost_model.profile import Profile
from std_core.types import Draft

BAR = 40  # characters
SHOWN = 20  # lines of a kind
CROSSING = Draft(
    "std", channels=0.5
)  # what n*_B compares: a fifth of the entries with half of the channels


@dataclass(frozen=True)
class Outlook:
    """What the times in a plan are made from. `price`: of an hour of one engine's machine."""

    profile: Profile
    setting: WaveConfig
    price: float | None = None


def report(
    waves: Sequence[Wave], failed: Sequence[FailedRequest], outlook: Outlook | None = None
) -> dict[str, Any]:
    """The plan as one JSON object; `contexts` counts requests by context length, in classes that
    double.

    Args:
        outlook: without one nothing is said of drafts and times.
    """
    requests = [r for wave in waves for r in wave.requests]
    infos = {r.info.uri: r.info for r in requests}
    plans = {r.frames_key: r.frame_plan for r in requests}
    videos = infos.keys() | {f.pending.input_row.video_uri for f in failed}
    found = {
        "requests": len(requests) + len(failed),
        "videos": len(videos),
        "hours": round(sum(info.duration for info in infos.values()) / 3600, 4),
        "frames": sum(len(p.times) for p in plans.values()),
        "context_tokens": sum(r.context for r in requests),
        "visual_tokens": sum(r.frame_plan.tokens for r in requests),
        "exact": all(info.exact for info in infos.values()),
        "waves": [_wave(wave) for wave in waves],
        "contexts": _histogram([r.context for r in requests]),
        "errors": len(failed),
        "failures": dict(Counter(f.error.code for f in failed)),
    }
    return found | (_expected(waves, outlook) if outlook else {})


def _wave(wave: Wave) -> dict[str, Any]:
    contexts = [request.context for request in wave.requests]
    sizes = {"requests": len(contexts), "shortest": min(contexts), "longest": max(contexts)}
    return sizes | (
        {"slots": wave.max_num_seqs, "draft": name_of(wave.draft)} if wave.options else {}
    )


def _class(context: int) -> int:
    """Upper bound of the class that a context length is in."""
    return int(2 ** max(1, (context - 1).bit_length()))


def _histogram(contexts: Sequence[int]) -> dict[str, int]:
    """Upper bound of a class → requests in it."""
    counts = Counter(map(_class, contexts))
    return {str(bound): counts[bound] for bound in sorted(counts)}


def name_of(draft: Draft | None) -> str:
    """A draft in few words: policy, what it keeps, what is cheaper of its weights, γ."""
    if draft is None:
        return "dense"
    kept = (
        []
        if draft.policy in ("full", "ngram")
        else [str(draft.k) if draft.k else f"{draft.keep:g}"]
    )
    cheap: list[str] = [draft.weights] if draft.weights != "full" else []
    cheap += [
        f"{name} {value:g}" for name in ("depth", "channels") if (value := getattr(draft, name)) < 1
    ]
    cheap += [f"by {draft.model}"] if draft.model else []
    return " ".join([draft.policy, *kept, *cheap, f"γ{draft.gamma}"])


# --------------------------------------------------------------------------------- what is expected


def _expected(waves: Sequence[Wave], outlook: Outlook) -> dict[str, Any]:
    profile = outlook.profile
    times = seconds(waves, profile)
    whole = sum(times.values())
    hours = _hours(whole, profile)
    found: dict[str, Any] = {
        "device": profile.device.name,
        "figures": provenance(profile),
        "buckets": _buckets(waves, profile),
        "seconds": {name: round(value, 3) for name, value in times.items()},
        "shares": {
            name: round(value / whole, 4) if whole else 0.0 for name, value in times.items()
        },
        "engine_hours": hours,
        "engine_hours_elsewhere": _elsewhere(waves, outlook),
    }
    if outlook.price is not None:
        found["cost"] = [round(value * outlook.price, 2) for value in hours]
    return found


def seconds(waves: Sequence[Wave], profile: Profile) -> dict[str, float]:
    """What one engine is expected to take, by what it does: each video is seen and prefilled
    once."""
    found = dict.fromkeys(("vision", "prefill", "decode"), 0.0)
    for wave in waves:
        known: set[tuple[object, ...]] = set()
        for request in wave.requests:
            text = request.context - request.frame_plan.tokens
            video = (request.info.uri, request.frame_plan.times)
            if video not in known:
                known.add(video)
                found["vision"] += request.frame_plan.tokens * profile.vision_s_per_token
                found["prefill"] += profile.prefill_s(request.context)
            else:
                found["prefill"] += profile.prefill.constant + profile.prefill.per_token * text
        found["decode"] += len(wave.requests) * wave.options[0].seconds_per_request
    return found


def _hours(whole: float, profile: Profile) -> list[float]:
    """At least, expected, at most."""
    low, high = profile.spread
    return [round(whole * factor / 3600, 4) for factor in (low, 1.0, high)]


def _elsewhere(waves: Sequence[Wave], outlook: Outlook) -> dict[str, list[float] | None]:
    """Hours on devices by their data sheets, in bfloat16; None where some request does not fit."""
    model_size = replace(outlook.profile.model_size, weight_bytes=2.0, kv_bytes=2.0)
    found: dict[str, list[float] | None] = {}
    for name in QUOTED_DEVICES:
        profile = estimated_profile(
            published_device(name), model_size, outlook.profile.model, "bfloat16"
        )
        again = [_chosen(wave, profile, outlook.setting) for wave in waves]
        known = [wave for wave in again if wave is not None]
        found[name] = (
            _hours(sum(seconds(known, profile).values()), profile)
            if len(known) == len(waves)
            else None
        )
    return found


def _chosen(wave: Wave, profile: Profile, setting: WaveConfig) -> Wave | None:
    ways = choose(WaveSummary.of(wave.requests, setting), profile, History(), setting, 0)
    return replace(wave, options=ways) if ways else None


def _buckets(waves: Sequence[Wave], profile: Profile) -> dict[str, dict[str, Any]]:
    """By the class of their longest context: slots, n*_B, drafts, and what was weighed for the
    largest of the waves."""
    classes: dict[int, list[Wave]] = {}
    for wave in waves:
        classes.setdefault(_class(max(r.context for r in wave.requests)), []).append(wave)
    return {str(bound): _bucket(classes[bound], profile) for bound in sorted(classes)}


def _bucket(waves: Sequence[Wave], profile: Profile) -> dict[str, Any]:
    largest = max(waves, key=lambda wave: len(wave.requests))
    rows = min(largest.max_num_seqs, len(largest.requests))
    union_fraction = profile.union_fraction(CROSSING, rows) or 1 - (1 - CROSSING.channels) ** rows
    drafts: Counter[str] = Counter()
    for wave in waves:
        drafts[name_of(wave.draft)] += len(wave.requests)
    return {
        "requests": sum(len(wave.requests) for wave in waves),
        "slots": sorted({wave.max_num_seqs for wave in waves}),
        "crossover": round(
            crossover_context(profile.model_size, CROSSING.keep, union_fraction, rows)
        ),
        "drafts": dict(drafts),
        "memory_gb": {name: round(size / 1e9, 3) for name, size in largest.options[0].memory},
        "candidates": [_candidate(way) for way in largest.options],
    }


def _candidate(way: DraftOption) -> dict[str, Any]:
    return {
        "draft": name_of(way.draft),
        "gammas": [way.gamma_schedule.min_gamma, way.gamma_schedule.max_gamma]
        if way.gamma_schedule
        else [],
        "slots": way.slots,
        "acceptance": round(way.acceptance, 3),
        "mb_per_token": round(way.bytes_per_token / 1e6, 3),
        "bound": round(way.speedup_bound, 3),
        "seconds": round(way.seconds_per_request, 4),
        "gain": round(way.speedup, 3),
    }


# --------------------------------------------------------------------------------------- for people


def table(plan: dict[str, Any], failed: Sequence[FailedRequest]) -> str:
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
        *map(_wave_line, plan["waves"][:SHOWN]),
    ]
    if len(plan["waves"]) > SHOWN:
        lines.append(f"{'…':>8} and {len(plan['waves']) - SHOWN} more")
    lines += ["", *_outlook_lines(plan)] if "buckets" in plan else []
    lines += ["", f"{len(failed)} requests will fail" if failed else "no failure is foreseen"]
    lines += [f"  {f.error.code}: {f.error.message}" for f in failed[:SHOWN]]
    if len(failed) > SHOWN:
        lines.append(f"  … and {len(failed) - SHOWN} more: {plan['failures']}")
    return "\n".join(lines)


def _wave_line(wave: dict[str, Any]) -> str:
    how = f", {wave['slots']} at a time, {wave['draft']}" if "draft" in wave else ""
    return f"{wave['requests']:>8} requests of {wave['shortest']} to {wave['longest']} tokens{how}"


def _bars(contexts: dict[str, int]) -> list[str]:
    most = max(contexts.values(), default=1)
    return [
        f"{'up to ' + bound:>16} {'█' * max(1, count * BAR // most)} {count}"
        for bound, count in contexts.items()
    ]


def _outlook_lines(plan: dict[str, Any]) -> list[str]:
    lines = []
    for bound, bucket in plan["buckets"].items():
        memory = ", ".join(f"{name} {size:g}" for name, size in bucket["memory_gb"].items() if size)
        lines += [
            f"up to {bound} tokens: slots {', '.join(map(str, bucket['slots']))}; fewer entries save more than half of "
            f"the channels from {bucket['crossover']} tokens on; GB: {memory}",
            f"{'draft':>28} {'slots':>5} {'accepts':>7} {'MB/token':>9} {'bound':>6} {'s/request':>9} {'gain':>5}",
            *(
                f"{c['draft'] + _free(c['gammas']):>28} {c['slots']:>5} {c['acceptance']:>7.2f} "
                f"{c['mb_per_token']:>9.1f} {c['bound']:>6.2f} {c['seconds']:>9.3f} {c['gain']:>5.2f}"
                for c in bucket["candidates"]
            ),
        ]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in plan["shares"].items())
    lines += [
        "",
        plan["figures"],
        f"{_range(plan['engine_hours'])} engine hours on {plan['device']}: {shares}",
    ]
    if "cost" in plan:
        lines.append(f"cost {_range(plan['cost'])}")
    for name, hours in plan["engine_hours_elsewhere"].items():
        lines.append(
            f"{name:>16} {'too small' if hours is None else _range(hours) + ' hours, by its data sheet'}"
        )
    return lines


def _free(gammas: Sequence[int]) -> str:
    """Between which numbers γ moves within a wave, if it does."""
    return " ({}–{})".format(*gammas) if gammas else ""


def _range(values: Sequence[float]) -> str:
    low, expected, high = values
    return f"{expected:g} ({low:g} to {high:g})"
