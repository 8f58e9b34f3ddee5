from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.driver.suspects import Group, Suspects, after_death

Kills = Callable[[list[str]], bool]


def drive(
    requests: list[str], slots: int, kills: Kills, order: Callable[[list[str]], int]
) -> tuple[Counter[str], ...]:
    """A driver with one engine, reduced to its decisions. `kills` sees who sits in the slots,
    `order` says which of them is answered next. Returns how often each request was answered,
    blamed, and in an engine that died."""
    suspects = Suspects()
    rest = deque(requests)
    answered = Counter[str]()
    blamed = Counter[str]()
    died = Counter[str]()
    while rest or suspects.waiting:
        trial = suspects.take()
        held: list[str] = list(trial.requests) if trial else []
        while held or (trial is None and rest):
            while trial is None and rest and len(held) < 2 * slots:
                held.append(rest.popleft())
            seated = held[:slots]
            if kills(seated):
                died.update(held)
                died["engines"] += 1
                if (culprit := suspects.died(held, trial)) is not None:
                    blamed[culprit] += 1
                break
            done = seated[order(seated)]
            answered[done] += 1
            held.remove(done)
    return answered, blamed, died


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_culprits_are_blamed_and_nobody_else_within_the_bound(
    count: int, slots: int, data: st.DataObject
) -> None:
    requests = [str(i) for i in range(count)]
    guilty = data.draw(st.sets(st.sampled_from(requests), max_size=4))
    order = lambda seated: data.draw(st.integers(0, len(seated) - 1))
    answered, blamed, died = drive(
        requests, slots, lambda seated: bool(guilty & set(seated)), order
    )
    assert blamed == Counter(guilty)
    assert answered == Counter(set(requests) - guilty)
    assert died["engines"] <= len(guilty) * (4 + math.ceil(math.log2(slots)))


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_a_culprit_that_strikes_late_is_blamed_too(
    count: int, slots: int, data: st.DataObject
) -> None:
    """It sits in its slot for a while, so that its mates are gone when the engine dies."""
    requests = [str(i) for i in range(count)]
    seen = Counter[str]()
    late = data.draw(st.integers(0, 12))
    guilty = data.draw(st.sampled_from(requests))

    def kills(seated: list[str]) -> bool:
        seen["now"] = seen["now"] + 1 if guilty in seated else 0
        return guilty in seated and (seen["now"] > late or seated == [guilty])

    answered, blamed, died = drive(
        requests, slots, kills, lambda seated: 0 if seated[0] != guilty else -1
    )
    assert blamed == Counter([guilty])
    assert answered == Counter(set(requests) - {guilty})
    assert died["engines"] <= 4 + math.ceil(math.log2(slots))


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 30), st.integers(1, 6), st.data())
def test_kills_from_outside_blame_nobody_whom_they_do_not_hit_twice_alone(
    count: int, slots: int, data: st.DataObject
) -> None:
    requests = [str(i) for i in range(count)]
    alone = Counter[str]()
    left = data.draw(st.integers(0, 12))
    strikes = iter(data.draw(st.lists(st.booleans(), min_size=200, max_size=200)))

    def kills(seated: list[str]) -> bool:
        nonlocal left
        hit = left > 0 and next(strikes, False)
        left -= hit
        if hit and len(seated) == 1:
            alone[seated[0]] += 1
        return hit

    answered, blamed, _ = drive(requests, slots, kills, lambda seated: 0)
    assert answered + blamed == Counter(requests)
    assert all(alone[name] >= 2 for name in blamed)


@given(st.lists(st.integers(0, 99), unique=True, max_size=20), st.data())
def test_every_suspect_runs_again_once_or_is_blamed(
    numbers: list[int], data: st.DataObject
) -> None:
    company = tuple(map(str, numbers))
    trial = data.draw(
        st.sampled_from([None, Group(company), Group(company, alone=1)] if company else [None])
    )
    held = data.draw(st.permutations(company)) if trial is None or len(company) < 2 else company[data.draw(
        st.integers(0, len(company) - 1)):]  # fmt: skip
    groups, blamed = after_death(held, trial)
    named = [name for group in groups for name in group.requests] + ([blamed] if blamed else [])
    assert sorted(named) == sorted(held)
    assert all(group.requests for group in groups)
    if blamed:
        assert trial == Group((blamed,), alone=1)


def test_the_way_down_to_one_culprit_among_sixteen() -> None:
    suspects = Suspects()
    sizes = []
    held = [str(i) for i in range(16)]
    trial = None
    while (culprit := suspects.died(held, trial)) is None:
        while "3" not in (trial := suspects.take()).requests:  # type: ignore[union-attr]
            pass  # these are answered
        held = list(trial.requests)
        sizes.append(len(held))
    assert culprit == "3"
    assert sizes == [16, 8, 4, 2, 1, 1]
