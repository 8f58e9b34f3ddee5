"""The plan: which requests an engine gets together, and how it decodes them.

Pure: depends on headers, prompts, a device profile and the results of earlier waves, and gives the
same waves for the same arguments. Decodes nothing, knows no engine, reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice

from pipeline.plan.choose import DraftPlanner
from pipeline.plan.history import History
from pipeline.plan.settings import WaveConfig, WaveSummary, longest_request
from pipeline.records import PlannedRequest, UsageError, Wave
from std_core.cost_model.profile import Profile

MAX_REQUESTS_PER_SLOT = 16  # in a wave, unless one video alone has more
MIN_REQUESTS_PER_SLOT = 8  # from here on a wave ends where contexts become much shorter
SIMILAR_RATIO = 1.25  # between the longest and the shortest of similar contexts


def plan(
    pool: Sequence[PlannedRequest],
    profile: Profile,
    history: History,
    idle_engines: int,
    closed: bool,
    config: WaveConfig,
) -> tuple[Wave, ...]:
    """Waves for idle engines, longest contexts first.

    Each request is in one wave at most. It stays in the pool while no engine is idle, while too few
    requests have a similar context length, and for good if it does not fit the device
    (`Capacity.misfit`).

    Args:
        pool: requests that are in no wave yet.
        idle_engines: upper bound of the number of waves.
        closed: no more requests will come. Otherwise only full waves of similar contexts are
            returned.

    Raises:
        UsageError: none of the pool's requests fits the device.
    """
    planner = DraftPlanner(profile, history, config)
    capacity = planner.capacity
    fits = cache(capacity.fits)  # many requests are equally long
    fitting = [request for request in pool if fits(longest_request(request, config))]
    if pool and not fitting:
        shortest = min(pool, key=lambda request: request.context)
        raise UsageError(capacity.advice(shortest))
    # the last requests of a run are shared among all engines
    max_requests = math.ceil(len(fitting) / config.engines) if closed else None
    groups = split_into_waves(fitting, capacity.slots_for, closed, max_requests)
    waves: list[Wave] = []
    remaining = len(fitting)
    for group in islice(groups, idle_engines):
        parts = [group]
        remaining -= len(group)
        while parts and len(waves) < idle_engines:
            requests = parts.pop()
            summary = WaveSummary.of(requests, config)
            options = planner.options(summary, history.waves + len(waves), remaining)
            if options:
                waves.append(Wave(tuple(requests), options[0].slots, options[0].draft, options))
            else:
                # one request has the most text and another the most frames: each fits, but a wave
                # whose caches have room for both does not
                middle = len(requests) // 2
                parts += [requests[middle:], requests[:middle]]
    return tuple(waves)


def split_into_waves(
    pool: Sequence[PlannedRequest],
    slots_for: Callable[[PlannedRequest], int],
    closed: bool = True,
    max_requests: int | None = None,
) -> Iterator[list[PlannedRequest]]:
    """Requests of each wave, longest contexts first.

    All questions on one video are next to each other in one wave, in the order of the pool, so that
    its frames are decoded once and held once.

    Args:
        slots_for: slots of a wave whose longest request is the given one.
        closed: whether the rest, which does not fill a wave, is returned too.
        max_requests: upper bound of the requests in a wave, but never below its slots.
    """
    wave: list[PlannedRequest] = []
    longest = 0
    slots = 1
    for group in _by_video(pool):
        context = max(request.context for request in group)
        similar = longest <= SIMILAR_RATIO * context
        full = len(wave) >= MIN_REQUESTS_PER_SLOT * slots
        limit = MAX_REQUESTS_PER_SLOT * slots
        if max_requests is not None:
            limit = min(limit, max(slots, max_requests))
        ends = len(wave) + len(group) > limit or (not similar and (full or not closed))
        if wave and ends:
            if closed or full:
                yield wave
            wave = []
        if not wave:
            longest = context
            slots = slots_for(max(group, key=lambda request: request.context))
        wave += group
    if wave and (closed or len(wave) >= MIN_REQUESTS_PER_SLOT * slots):
        yield wave


def _by_video(pool: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """The requests on each video, the video with the longest context first; ties in the order of
    the pool."""
    groups: dict[tuple[str, str], list[PlannedRequest]] = {}
    for request in pool:
        groups.setdefault((request.info.uri, request.info.version), []).append(request)
    for group in groups.values():  # windows in order of time, questions on one next to each other
        group.sort(key=lambda request: request.window or (0.0, 0.0))
    return sorted(groups.values(), key=lambda group: -max(request.context for request in group))
