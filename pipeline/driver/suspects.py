"""Who killed the engine: of the requests that an engine held when it died, which run next, in whose
company, and whom to blame. Pure: knows no engine, no clock and no Ray.

Whatever an engine held when it died is suspected. Suspects run again together, in an engine that is
handed nobody else; if it dies too they run in halves, and so on. Blamed is only who ended an engine
twice that had nobody but him from the start of the trial. Of n suspects one culprit thus ends 3 +
⌈log2 n⌉ engines; an engine is handed at most two requests per slot, which makes 4 + ⌈log2
slots⌉."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

ALONE = 2  # deaths alone in an engine that make a culprit


@dataclass(frozen=True)
class Group:
    """Suspects that run together and with nobody else; `alone` counts the engines that ended under
    a single one."""

    requests: tuple[str, ...]
    alone: int = 0


def after_death(held: Sequence[str], trial: Group | None) -> tuple[tuple[Group, ...], str | None]:
    """What follows from an engine's death.

    Args:
        held: requests that it had been handed and had not answered.
        trial: the group that it was running; None where it did ordinary work.

    Returns: The groups that run next, in which each of `held` is once, and a request to blame,
        which is in no group.
    """
    if not held:
        return (), None
    if trial is None or (len(held) == 1 < len(trial.requests)):
        return (Group(tuple(held)),), None
    if len(trial.requests) == 1:
        alone = trial.alone + 1
        return ((), held[0]) if alone == ALONE else ((Group(trial.requests, alone),), None)
    half = (len(held) + 1) // 2
    return (Group(tuple(held[:half])), Group(tuple(held[half:]))), None


@dataclass
class Suspects:
    """The groups that wait for an engine of their own."""

    waiting: deque[Group] = field(default_factory=deque)

    def died(self, held: Sequence[str], trial: Group | None) -> str | None:
        """Notes an engine's death; returns whom to blame, if anyone. The newest suspects are tried
        first."""
        groups, blamed = after_death(held, trial)
        self.waiting.extendleft(reversed(groups))
        return blamed

    def take(self) -> Group | None:
        """The next group to run."""
        return self.waiting.popleft() if self.waiting else None

    def drop(self, requests: Iterable[str]) -> None:
        """Forgets requests that were answered otherwise."""
        gone = set(requests)
        left = [
            replace(g, requests=tuple(r for r in g.requests if r not in gone)) for g in self.waiting
        ]
        self.waiting = deque(group for group in left if group.requests)

    def put_back(self, group: Group) -> None:
        """Takes back a group whose trial was broken off for no fault of its members."""
        self.waiting.appendleft(group)
