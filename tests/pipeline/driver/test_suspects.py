from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.driver.suspects import SuspectGroup, Suspects, after_death

Kills = Callable[[list[str]], bool]


@dataclass
class Outcome:
    """How often each request was completed and blamed, and how many engines died."""

    completed: Counter[str] = field(default_factory=Counter)
    blamed: Counter[str] = field(default_factory=Counter)
    deaths: int = 0


def simulate(
    requests: list[str], slots: int, kills: Kills, choose_row: Callable[[list[str]], int]
) -> Outcome:
    """Simulate a driver with one engine.

    Args:
        kills: whether the engine dies with these rows.
        choose_row: index of the row that is completed next.
    """
    suspects = Suspects()
    remaining = deque(requests)
    outcome = Outcome()
    while remaining or suspects.waiting:
        trial = suspects.take()
        in_engine: list[str] = list(trial.requests) if trial else []
        while in_engine or (trial is None and remaining):
            while trial is None and remaining and len(in_engine) < 2 * slots:
                in_engine.append(remaining.popleft())
            rows = in_engine[:slots]
            if kills(rows):
                outcome.deaths += 1
                culprit = suspects.add_after_death(in_engine, trial)
                if culprit is not None:
                    outcome.blamed[culprit] += 1
                break
            done = rows[choose_row(rows)]
            outcome.completed[done] += 1
            in_engine.remove(done)
    return outcome


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_only_culprits_are_blamed_within_the_bound_of_deaths(
    count: int, slots: int, data: st.DataObject
) -> None:
    requests = [str(i) for i in range(count)]
    guilty = data.draw(st.sets(st.sampled_from(requests), max_size=4))
    outcome = simulate(
        requests,
        slots,
        kills=lambda rows: bool(guilty & set(rows)),
        choose_row=lambda rows: data.draw(st.integers(0, len(rows) - 1)),
    )
    assert outcome.blamed == Counter(guilty)
    assert outcome.completed == Counter(set(requests) - guilty)
    assert outcome.deaths <= len(guilty) * (4 + math.ceil(math.log2(slots)))


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_a_culprit_that_kills_late_is_blamed_too(
    count: int, slots: int, data: st.DataObject
) -> None:
    """It occupies its slot for a while, so that other rows are completed before the engine dies."""
    requests = [str(i) for i in range(count)]
    delay = data.draw(st.integers(0, 12))
    guilty = data.draw(st.sampled_from(requests))
    rounds = 0

    def kills(rows: list[str]) -> bool:
        nonlocal rounds
        rounds = rounds + 1 if guilty in rows else 0
        return guilty in rows and (rounds > delay or rows == [guilty])

    outcome = simulate(
        requests, slots, kills, choose_row=lambda rows: 0 if rows[0] != guilty else -1
    )
    assert outcome.blamed == Counter([guilty])
    assert outcome.completed == Counter(set(requests) - {guilty})
    assert outcome.deaths <= 4 + math.ceil(math.log2(slots))


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 30), st.integers(1, 6), st.data())
def test_kills_from_outside_blame_only_requests_that_they_hit_twice_alone(
    count: int, slots: int, data: st.DataObject
) -> None:
    requests = [str(i) for i in range(count)]
    hits_alone = Counter[str]()
    remaining_kills = data.draw(st.integers(0, 12))
    strikes = iter(data.draw(st.lists(st.booleans(), min_size=200, max_size=200)))

    def kills(rows: list[str]) -> bool:
        nonlocal remaining_kills
        hit = remaining_kills > 0 and next(strikes, False)
        remaining_kills -= hit
        if hit and len(rows) == 1:
            hits_alone[rows[0]] += 1
        return hit

    outcome = simulate(requests, slots, kills, choose_row=lambda rows: 0)
    assert outcome.completed + outcome.blamed == Counter(requests)
    assert all(hits_alone[name] >= 2 for name in outcome.blamed)


@given(st.lists(st.integers(0, 99), unique=True, max_size=20), st.data())
def test_every_suspect_runs_again_once_or_is_blamed(
    numbers: list[int], data: st.DataObject
) -> None:
    members = tuple(map(str, numbers))
    trials: list[SuspectGroup | None] = [None]
    if members:
        trials += [SuspectGroup(members), SuspectGroup(members, deaths_alone=1)]
    trial = data.draw(st.sampled_from(trials))
    if trial is None or len(members) < 2:
        lost = tuple(data.draw(st.permutations(members)))
    else:  # some suspects of the trial were completed before
        lost = members[data.draw(st.integers(0, len(members) - 1)) :]
    groups, blamed = after_death(lost, trial)
    found = [name for group in groups for name in group.requests]
    found += [blamed] if blamed else []
    assert sorted(found) == sorted(lost)
    assert all(group.requests for group in groups)
    if blamed:
        assert trial == SuspectGroup((blamed,), deaths_alone=1)


def test_trials_down_to_one_culprit_among_sixteen() -> None:
    suspects = Suspects()
    sizes = []
    in_engine = [str(i) for i in range(16)]
    trial = None
    while (culprit := suspects.add_after_death(in_engine, trial)) is None:
        trial = suspects.take()
        while trial is not None and "3" not in trial.requests:
            trial = suspects.take()  # groups without the culprit are completed
        assert trial is not None
        in_engine = list(trial.requests)
        sizes.append(len(in_engine))
    assert culprit == "3"
    assert sizes == [16, 8, 4, 2, 1, 1]
