"""The plan: which requests an engine is handed together. Pure; sees only what headers and prompts say.

Decodes nothing, knows no engine, and reads no clock: the same pool gives the same waves.
"""

from __future__ import annotations

from pipeline.types import Planned, Wave

WAVE = 16  # × max_num_seqs requests in a wave at most, unless one video alone has more
HALF = 8  # × max_num_seqs: from here on a wave ends where contexts grow much shorter
LIKE = 1.25  # contexts within this ratio are alike


def plan(pool: tuple[Planned, ...], max_num_seqs: int) -> tuple[Wave, ...]:
    """Every request of the pool in exactly one wave, longest contexts first.

    All questions on one video lie side by side, in one wave, in the order of the pool, so that its frames are decoded
    and held once.
    """
    waves: list[list[Planned]] = []
    for group in _by_video(pool):
        if not waves or _ends(waves[-1], group, max_num_seqs):
            waves.append([])
        waves[-1] += group
    return tuple(Wave(tuple(requests), max_num_seqs) for requests in waves)


def _by_video(pool: tuple[Planned, ...]) -> list[list[Planned]]:
    """Groups that share frames, the one with the longest context first; ties by the pool's order."""
    groups: dict[tuple[str, str], list[Planned]] = {}
    for request in pool:
        groups.setdefault((request.info.uri, request.info.version), []).append(request)
    for group in groups.values():  # windows one behind the other, the questions on one side by side
        group.sort(key=lambda request: request.window or (0.0, 0.0))
    return sorted(groups.values(), key=lambda group: -max(r.context for r in group))


def _ends(wave: list[Planned], group: list[Planned], max_num_seqs: int) -> bool:
    """Whether a wave is closed before this group."""
    if len(wave) + len(group) > WAVE * max_num_seqs:
        return True
    longest, next_longest = max(r.context for r in wave), max(r.context for r in group)
    return len(wave) >= HALF * max_num_seqs and longest > LIKE * next_longest
