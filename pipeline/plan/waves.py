"""The plan: which requests an engine is handed together, and with which draft. Pure; sees only what
headers and prompts say, what the device was measured to do, and what earlier waves have shown.

Decodes nothing, knows no engine, and reads no clock: the same snapshot gives the same waves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice

from pipeline.plan.choose import MEMORY, choose, fallback, memory_of, slots_of
from pipeline.plan.history import History
from pipeline.plan.settings import WaveConfig, WaveSummary, load_of
from pipeline.records import PlannedRequest, RequestError, UsageError, Wave
from std_core.cost_model.memory import LongestRequest, peak_memory
from std_core.cost_model.profile import Profile

__all__ = ["HALF", "LIKE", "WAVE", "History", "WaveConfig", "cut", "misfit", "plan"]

WAVE = 16  # × slots requests in a wave at most, unless one video alone has more
HALF = 8  # × slots: from here on a wave ends where contexts grow much shorter
LIKE = 1.25  # contexts within this ratio are alike


def plan(
    pool: Sequence[PlannedRequest],
    profile: Profile,
    history: History,
    idle_engines: int,
    closed: bool,
    setting: WaveConfig,
) -> tuple[Wave, ...]:
    """Waves for idle engines, longest contexts first.

    A request of the pool is in one wave at most: what is in none stays in the pool until engines
    are idle again, until there are more of its context length, or, where even a single slot is too
    small for it (`misfit`), for good.

    Args:
        pool: requests that are in no wave yet.
        idle_engines: waves at most.
        closed: no more requests will come; else only full waves of like contexts are handed out.

    Raises:
        UsageError: none of the pool's requests fits the device.
    """
    fits = _fitting(profile, setting)
    fitting = [request for request in pool if fits(load_of(request, setting))]
    if pool and not fitting:
        raise UsageError(advice(min(pool, key=lambda r: r.context), profile, setting))
    draft = fallback(profile, setting)

    def slots(request: PlannedRequest) -> int:
        return slots_of(load_of(request, setting), profile, setting, draft)

    waves: list[Wave] = []
    most = (
        -(-len(fitting) // setting.engines) if closed else None
    )  # the last waves are shared among all engines
    for requests in islice(cut(fitting, slots, closed, most), idle_engines):
        parts = [requests]
        while parts and len(waves) < idle_engines:
            part = parts.pop()
            ways = choose(
                WaveSummary.of(part, setting), profile, history, setting, history.waves + len(waves)
            )
            if ways:
                waves.append(Wave(tuple(part), ways[0].slots, ways[0].draft, ways))
            else:  # much text and many frames, which fit on their own and not together
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
    return tuple(waves)


def misfit(request: PlannedRequest, profile: Profile, setting: WaveConfig) -> RequestError | None:
    """Why a request can be in no wave; None if it can."""
    if slots_of(load_of(request, setting), profile, setting, fallback(profile, setting)):
        return None
    return RequestError("out_of_memory", advice(request, profile, setting))


def advice(request: PlannedRequest, profile: Profile, setting: WaveConfig) -> str:
    """What would make a request fit, in one sentence."""
    draft = fallback(profile, setting)
    needs = memory_of(load_of(request, setting), profile, draft, slots=1)
    most = max(needs, key=lambda name: needs[name])
    small = "a smaller model, --dtype bfloat16, or more GPUs per engine (--pipeline-parallel-size)"
    short = "lower fps, max_frames, max_pixels, total_pixels or --max-tokens"
    what = small if most in ("weights", "draft_weights") else short
    return (
        f"a request of {request.context} tokens needs {peak_memory(needs) / 1e9:.1f} GB alone, "
        f"{needs[most] / 1e9:.1f} of them for {most.replace('_', ' ')}, and {profile.device.name} can give "
        f"{MEMORY * profile.device.memory / 1e9:.1f}: {what} would help"
    )


def cut(
    pool: Sequence[PlannedRequest],
    slots: Callable[[PlannedRequest], int],
    closed: bool = True,
    most: int | None = None,
) -> Iterator[list[PlannedRequest]]:
    """Requests that are handed out together, longest contexts first.

    All questions on one video lie side by side, in one wave, in the order of the pool, so that its
    frames are decoded and held once.

    Args:
        slots: that a wave has whose longest request is this one.
        closed: what is left over is handed out too.
        most: requests in a wave, unless it has fewer than slots.
    """
    wave: list[PlannedRequest] = []
    longest = 0
    room = 1
    for group in _by_video(pool):
        context = max(r.context for r in group)
        alike = longest <= LIKE * context
        full = len(wave) >= HALF * room
        bound = WAVE * room if most is None else min(WAVE * room, max(room, most))
        if wave and (len(wave) + len(group) > bound or (not alike and (full or not closed))):
            if closed or full:
                yield wave
            wave = []
        if not wave:
            longest = context
            room = slots(max(group, key=lambda r: r.context))
        wave += group
    if wave and (closed or len(wave) >= HALF * room):
        yield wave


def _by_video(pool: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """Groups that share frames, the one with the longest context first; ties by the pool's
    order."""
    groups: dict[tuple[object, ...], list[PlannedRequest]] = {}
    for request in pool:
        groups.setdefault((request.info.uri, request.info.version), []).append(request)
    for group in groups.values():  # windows one behind the other, the questions on one side by side
        group.sort(key=lambda request: request.window or (0.0, 0.0))
    return sorted(groups.values(), key=lambda group: -max(r.context for r in group))


def _fitting(profile: Profile, setting: WaveConfig) -> Callable[[LongestRequest], bool]:
    draft = fallback(profile, setting)
    return cache(lambda load: slots_of(load, profile, setting, draft) > 0)
