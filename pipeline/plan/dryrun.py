"""The report of a dry run: counts, tokens, waves, drafts, hours and cost, predicted from headers
alone. `plan_table.py` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.plan.choose import DraftPlanner
from pipeline.plan.history import History
from pipeline.plan.profile_file import describe_source
from pipeline.plan.reason import describe_draft, explain_choice
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption, FailedRequest, Wave
from std_core.cost_model.crossover import crossover_context
from std_core.cost_model.device_specs import QUOTED_DEVICES, estimated_profile, published_device
from std_core.cost_model.profile import Profile
from std_core.types import Draft

# the draft that n*_B is reported for: a fifth of the KV entries against half of the channels
CROSSOVER_DRAFT = Draft("std", keep=0.2, channels=0.5)


@dataclass(frozen=True)
class PlanningInputs:
    """What predictions are made from, besides the requests.

    Args:
        price_per_hour: of the machine of one engine, in any currency; None reports no cost.
    """

    profile: Profile
    config: WaveConfig
    price_per_hour: float | None = None


def report(
    waves: Sequence[Wave], failed: Sequence[FailedRequest], inputs: PlanningInputs | None = None
) -> dict[str, Any]:
    """The plan as one JSON object.

    `contexts` counts requests by context length, in classes whose upper bounds are powers of 2.

    Args:
        inputs: without them, nothing is said of drafts and times.
    """
    requests = [request for wave in waves for request in wave.requests]
    infos = {request.info.uri: request.info for request in requests}
    frame_plans = {request.frames_key: request.frame_plan for request in requests}
    videos = infos.keys() | {failure.pending.input_row.video_uri for failure in failed}
    content = {
        "requests": len(requests) + len(failed),
        "videos": len(videos),
        "hours": round(sum(info.duration for info in infos.values()) / 3600, 4),
        "frames": sum(len(frame_plan.times) for frame_plan in frame_plans.values()),
        "context_tokens": sum(request.context for request in requests),
        "visual_tokens": sum(request.frame_plan.tokens for request in requests),
        "exact": all(info.exact for info in infos.values()),
        "waves": [_wave(wave) for wave in waves],
        "contexts": _histogram([request.context for request in requests]),
        "errors": len(failed),
        "failures": dict(Counter(failure.error.code for failure in failed)),
    }
    if inputs is not None:
        content |= _predictions(waves, inputs)
    return content


def predicted_seconds(waves: Sequence[Wave], profile: Profile) -> dict[str, float]:
    """Seconds of one engine by phase. Each video is encoded and prefilled once per wave; further
    questions on it prefill their text only."""
    seconds = {"vision": 0.0, "prefill": 0.0, "decode": 0.0}
    for wave in waves:
        prefilled: set[tuple[str, tuple[float, ...]]] = set()
        for request in wave.requests:
            visual = request.frame_plan.tokens
            video = (request.info.uri, request.frame_plan.times)
            if video in prefilled:
                text = request.context - visual
                seconds["prefill"] += profile.prefill.constant + profile.prefill.per_token * text
            else:
                prefilled.add(video)
                seconds["vision"] += visual * profile.vision_s_per_token
                seconds["prefill"] += profile.prefill_s(request.context)
        seconds["decode"] += len(wave.requests) * wave.options[0].seconds_per_request
    return seconds


def _wave(wave: Wave) -> dict[str, Any]:
    contexts = [request.context for request in wave.requests]
    content: dict[str, Any] = {
        "requests": len(contexts),
        "shortest": min(contexts),
        "longest": max(contexts),
    }
    if wave.options:
        content |= {"slots": wave.max_num_seqs, "draft": describe_draft(wave.draft)}
    return content


def _context_class(context: int) -> int:
    """Upper bound of a context length's class: the next power of 2."""
    return int(2 ** max(1, (context - 1).bit_length()))


def _histogram(contexts: Sequence[int]) -> dict[str, int]:
    """Upper bound of a class → requests in it."""
    counts = Counter(map(_context_class, contexts))
    return {str(bound): counts[bound] for bound in sorted(counts)}


# --- predictions ---------------------------------------------------------------------------------


def _predictions(waves: Sequence[Wave], inputs: PlanningInputs) -> dict[str, Any]:
    profile = inputs.profile
    seconds = predicted_seconds(waves, profile)
    total = sum(seconds.values())
    hours = _hours(total, profile)
    content: dict[str, Any] = {
        "device": profile.device.name,
        "figures": describe_source(profile),
        "buckets": _buckets(waves, inputs),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "shares": {
            phase: round(value / total, 4) if total else 0.0 for phase, value in seconds.items()
        },
        "engine_hours": hours,
        "engine_hours_elsewhere": _hours_on_known_devices(waves, inputs),
    }
    if inputs.price_per_hour is not None:
        content["cost"] = [round(value * inputs.price_per_hour, 2) for value in hours]
    return content


def _hours(seconds: float, profile: Profile) -> list[float]:
    """Hours: lower bound, expected, upper bound."""
    low, high = profile.spread
    return [round(seconds * factor / 3600, 7) for factor in (low, 1.0, high)]


def _hours_on_known_devices(
    waves: Sequence[Wave], inputs: PlanningInputs
) -> dict[str, list[float] | None]:
    """Hours by device, from data sheets and in bfloat16; None where some request does not fit."""
    size = replace(inputs.profile.model_size, weight_bytes=2.0, kv_bytes=2.0)
    hours: dict[str, list[float] | None] = {}
    for name in QUOTED_DEVICES:
        profile = estimated_profile(published_device(name), size, inputs.profile.model, "bfloat16")
        planner = DraftPlanner(profile, History(), inputs.config)
        replanned = [_replanned(wave, planner) for wave in waves]
        fitting = [wave for wave in replanned if wave is not None]
        hours[name] = None
        if len(fitting) == len(waves):
            hours[name] = _hours(sum(predicted_seconds(fitting, profile).values()), profile)
    return hours


def _replanned(wave: Wave, planner: DraftPlanner) -> Wave | None:
    """The same requests with the planner's options; None if they do not fit its device."""
    options = planner.options(WaveSummary.of(wave.requests, planner.config), wave_index=0)
    return replace(wave, options=options) if options else None


def _buckets(waves: Sequence[Wave], inputs: PlanningInputs) -> dict[str, dict[str, Any]]:
    """Upper bound of the class of a wave's longest context → what is planned for such waves."""
    by_class: dict[int, list[Wave]] = {}
    for wave in waves:
        longest = max(request.context for request in wave.requests)
        by_class.setdefault(_context_class(longest), []).append(wave)
    return {str(bound): _bucket(by_class[bound], inputs) for bound in sorted(by_class)}


def _bucket(waves: Sequence[Wave], inputs: PlanningInputs) -> dict[str, Any]:
    """Slots, n*_B and drafts of all waves; memory, options and reason of the largest."""
    profile = inputs.profile
    largest = max(waves, key=lambda wave: len(wave.requests))
    rows = min(largest.max_num_seqs, len(largest.requests))
    union_fraction = profile.union_fraction(CROSSOVER_DRAFT, rows)
    if union_fraction is None:  # as if rows chose their channels independently
        union_fraction = 1 - (1 - CROSSOVER_DRAFT.channels) ** rows
    crossover = crossover_context(profile.model_size, CROSSOVER_DRAFT.keep, union_fraction, rows)
    requests_by_draft: Counter[str] = Counter()
    for wave in waves:
        requests_by_draft[describe_draft(wave.draft)] += len(wave.requests)
    return {
        "requests": sum(len(wave.requests) for wave in waves),
        "slots": sorted({wave.max_num_seqs for wave in waves}),
        "crossover": round(crossover),
        "drafts": dict(requests_by_draft),
        "reason": explain_choice(largest.options, profile, inputs.config),
        "memory_gb": {name: round(size / 1e9, 3) for name, size in largest.options[0].memory},
        "candidates": [_option(option) for option in largest.options],
    }


def _option(option: DraftOption) -> dict[str, Any]:
    schedule = option.gamma_schedule
    return {
        "draft": describe_draft(option.draft),
        "gammas": [schedule.min_gamma, schedule.max_gamma] if schedule else [],
        "slots": option.slots,
        "acceptance": round(option.acceptance, 3),
        "mb_per_token": round(option.bytes_per_token / 1e6, 3),
        "bound": round(option.speedup_bound, 3),
        "seconds": round(option.seconds_per_request, 4),
        "gain": round(option.speedup, 3),
    }
