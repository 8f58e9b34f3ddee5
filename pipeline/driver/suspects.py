"""Finding the request that kills engines: which requests run again after an engine's death, in
which groups, and which one is to blame. Pure: knows no engine, no clock and no Ray.

All requests that an engine had when it died are suspects. They run again together, in an engine
that gets no other request. If that engine dies too, they run in halves, and so on. A request is
blamed only after two engines died that had no other request since the start of the trial.

A single culprit among n suspects thus ends 3 + ⌈log2 n⌉ engines. An engine has at most two requests
per slot, so the bound is 4 + ⌈log2 slots⌉.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

DEATHS_ALONE = 2  # engines that die with one request alone before it is blamed


@dataclass(frozen=True)
class SuspectGroup:
    """Suspects that run together, in an engine that gets no other request.

    Args:
        requests: their ids.
        deaths_alone: engines that died while the group consisted of one request.
    """

    requests: tuple[str, ...]
    deaths_alone: int = 0


def after_death(
    lost: Sequence[str], trial: SuspectGroup | None
) -> tuple[tuple[SuspectGroup, ...], str | None]:
    """Decide what follows from an engine's death.

    Args:
        lost: ids of the requests that were in the engine.
        trial: the group that it was running; None if it ran ordinary work.

    Returns:
        The groups to run next, which together contain each of `lost` once, and the id of the
        request to blame, which is in no group, or None.
    """
    if not lost:
        return (), None
    if trial is None:
        return (SuspectGroup(tuple(lost)),), None
    if len(trial.requests) == 1:
        deaths = trial.deaths_alone + 1
        if deaths == DEATHS_ALONE:
            return (), lost[0]
        return (SuspectGroup(trial.requests, deaths),), None
    if len(lost) == 1:  # it was not alone from the start of the trial
        return (SuspectGroup(tuple(lost)),), None
    half = (len(lost) + 1) // 2
    halves = lost[:half], lost[half:]
    return tuple(SuspectGroup(tuple(requests)) for requests in halves), None


@dataclass
class Suspects:
    """The groups that wait for an engine of their own."""

    waiting: deque[SuspectGroup] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Requests in all groups."""
        return sum(len(group.requests) for group in self.waiting)

    def add_after_death(self, lost: Sequence[str], trial: SuspectGroup | None) -> str | None:
        """Queue the groups of `after_death` before all others; return the request to blame."""
        groups, blamed = after_death(lost, trial)
        self.waiting.extendleft(reversed(groups))
        return blamed

    def take(self) -> SuspectGroup | None:
        """Remove and return the next group."""
        return self.waiting.popleft() if self.waiting else None

    def postpone(self, group: SuspectGroup) -> None:
        """Queue a group behind all others."""
        self.waiting.append(group)

    def put_back(self, group: SuspectGroup) -> None:
        """Queue a group before all others; its trial ended for a reason outside of it."""
        self.waiting.appendleft(group)

    def drop(self, requests: Iterable[str]) -> None:
        """Remove requests that were completed in another way."""
        dropped = set(requests)
        remaining: deque[SuspectGroup] = deque()
        for group in self.waiting:
            kept = tuple(name for name in group.requests if name not in dropped)
            if kept:
                remaining.append(replace(group, requests=kept))
        self.waiting = remaining
