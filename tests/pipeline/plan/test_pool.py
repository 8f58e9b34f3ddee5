from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan import pool as pool_module
from pipeline.plan.capacity import Capacity
from pipeline.plan.pool import RequestPool, split_by_capacity
from pipeline.plan.settings import WaveConfig
from pipeline.records import (
    FailedRequest,
    InputRow,
    PendingRequest,
    PlannedRequest,
    ProbedRequest,
    RequestError,
    UsageError,
    Wave,
)
from std_core.cost_model.acceptance import AcceptanceCounts
from std_core.types import Result
from tests.pipeline.plan.stub_plan import (
    A100,
    BAD,
    INT4,
    PROFILE,
    planned_request,
)

GOOD_DRAFT = replace(INT4, acceptance=(AcceptanceCounts(4096, "caption", (90,), (10,)),))
POOR_DRAFT = replace(BAD, acceptance=(AcceptanceCounts(4096, "caption", (60,), (40,)),))
POOL_PROFILE = replace(PROFILE, drafts=(GOOD_DRAFT, POOR_DRAFT))
HUGE = 10_000_000  # tokens that no device holds


def request(
    number: int, context: int = 4000, video: int | None = None, frames: int = 1
) -> PlannedRequest:
    video = number if video is None else video
    return planned_request(number, video, context, frames=frames)


def failure(number: int) -> FailedRequest:
    return FailedRequest(
        PendingRequest(str(number), InputRow("w.mp4", "?")),
        RequestError("not_found", "w.mp4 is not there"),
    )


class Batches:
    """A source of requests whose first `ready` batches can be taken."""

    def __init__(self, batches: list[list[ProbedRequest]], ready: int | None = None):
        self.batches = deque(batches)
        self.ready = len(batches) if ready is None else ready

    @property
    def closed(self) -> bool:
        return not self.batches

    def take(self, seconds: float = 0.0) -> list[ProbedRequest] | None:
        if not self.ready or not self.batches:
            return None
        self.ready -= 1
        return self.batches.popleft()


class Recorded:
    """A pool, and the waves and failures that it reported."""

    def __init__(self, source: Batches, config: WaveConfig | None = None):
        self.source = source
        self.failed: list[FailedRequest] = []
        self.waves: list[Wave] = []
        profile_on: Any = lambda device: replace(POOL_PROFILE, device=device)
        self.pool = RequestPool(
            source,
            on_failed=self.failed.append,
            on_wave=self.waves.append,
            profile_on=profile_on,
            config=config or WaveConfig(4),
        )
        self.pool.begin(A100, 2)

    def names(self) -> Counter[str]:
        out = Counter(r.request_id for wave in self.waves for r in wave.requests)
        return out + Counter(f.pending.request_id for f in self.failed)


batches = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["fits", "fails", "huge"]), st.integers(1, 8000), st.integers(0, 9)
        ),
        max_size=30,
    ),
    min_size=1,
    max_size=6,
)
calls = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30)


@settings(deadline=None, max_examples=60)
@given(batches, calls)
def test_every_request_is_in_one_wave_or_failure_whenever_it_arrives(
    drawn: list[list[tuple[str, int, int]]], calls: list[tuple[int, bool]]
) -> None:
    numbers = iter(range(10**6))
    make: dict[str, Any] = {
        "fits": lambda context, video: request(next(numbers), context, video),
        "fails": lambda context, video: failure(next(numbers)),
        "huge": lambda context, video: request(next(numbers), HUGE),
    }
    source = Batches(
        [[make[kind](context, video) for kind, context, video in batch] for batch in drawn], ready=0
    )
    source.batches.append([request(next(numbers))])  # one at least fits
    recorded = Recorded(source)
    for arrived, engine_idle in [*calls, *[(9, True)] * 999]:
        source.ready += arrived
        recorded.pool.take(engine_idle)
        if recorded.pool.closed:
            break
    assert recorded.pool.closed
    assert recorded.names() == Counter(str(i) for i in range(next(numbers)))
    huge = {str(f.pending.request_id) for f in recorded.failed if f.error.code == "out_of_memory"}
    assert len(huge) == sum(kind == "huge" for batch in drawn for kind, *_ in batch)


def test_a_partial_wave_waits_for_similar_requests_unless_an_engine_is_idle() -> None:
    source = Batches([[request(i) for i in range(5)], [request(i) for i in range(5, 64)]], ready=1)
    recorded = Recorded(source)
    assert recorded.pool.take(engine_idle=False) is None
    assert recorded.pool.take(engine_idle=False) is None
    wave = recorded.pool.take(engine_idle=True)
    assert wave is not None and 1 <= len(wave.requests) <= 5
    source.ready = 1
    wave = recorded.pool.take(engine_idle=False)
    assert wave is not None and len(wave.requests) > 5


def test_a_full_pool_hands_out_partial_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_REQUESTS", 8)
    source = Batches([[request(i, 100 * 2**i) for i in range(8)], [request(9)]], ready=1)
    assert Recorded(source).pool.take(engine_idle=False) is not None


def test_the_pools_planned_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_FRAMES", 20)
    source = Batches([[request(i, frames=8)] for i in range(30)])
    recorded = Recorded(source)
    wave = recorded.pool.take(engine_idle=False)
    assert wave is not None and sum(len(r.frame_plan.times) for r in wave.requests) <= 20 + 8
    assert len(source.batches) >= 26
    while not recorded.pool.closed:
        recorded.pool.take(engine_idle=False)
    assert recorded.names() == Counter(str(i) for i in range(30))


def test_if_nothing_fits_the_error_names_the_remedy() -> None:
    """Before an engine is started, if all headers are read by then."""
    listed: list[list[ProbedRequest]] = [[request(0, HUGE), failure(1)], [request(2, HUGE)]]
    with pytest.raises(UsageError, match=r"needs .* GB alone.* would help"):
        Recorded(Batches(listed))
    source = Batches(listed, ready=1)
    recorded = Recorded(source)
    assert recorded.pool.take(engine_idle=True) is None
    source.ready = 1
    with pytest.raises(UsageError, match=r"needs .* GB alone.* would help"):
        recorded.pool.take(engine_idle=True)
    capacity = Capacity(POOL_PROFILE, WaveConfig(4))
    with pytest.raises(UsageError, match="would help"):
        split_by_capacity([request(0, HUGE)], capacity)
    fitting, failed = split_by_capacity([request(0, HUGE), request(1)], capacity)
    assert [r.request_id for r in fitting] == ["1"]
    assert [f.request_id for f in failed] == ["0"]


def test_results_of_a_wave_change_the_next_waves_draft() -> None:
    """All tokens of the chosen draft are rejected; the next wave has another draft."""
    recorded = Recorded(Batches([[request(i) for i in range(200)]]))
    first = recorded.pool.take(engine_idle=True)
    assert first is not None and first.draft is not None and first.draft.weights == "int4"
    drafted = 40 * first.draft.gamma
    refused: dict[str, Any] = {
        "rounds": 40,
        "drafted": drafted,
        "accept_counts": (40, 0),
        "reject_counts": (40, 0),
    }
    results = [
        Result(r.request_id, token_ids=[1] * 40, text="", finish_reason="length", **refused)
        for r in first.requests
    ]
    for _ in range(3):
        recorded.pool.complete(first, results)
    second = recorded.pool.take(engine_idle=True)
    assert second is not None and (second.draft is None or second.draft.weights != "int4")


def test_later_waves_keep_to_a_slot_limit() -> None:
    recorded = Recorded(Batches([[request(i) for i in range(300)]]))
    first = recorded.pool.take(engine_idle=True)
    recorded.pool.limit_slots(2)
    second = recorded.pool.take(engine_idle=True)
    assert first is not None and second is not None
    assert (first.max_num_seqs, second.max_num_seqs) == (4, 2)


def test_a_pool_without_planned_requests_is_empty_and_closed() -> None:
    recorded = Recorded(Batches([[failure(0)], [failure(1)]]))
    while recorded.pool.poll():
        pass
    assert recorded.pool.empty and recorded.pool.closed and len(recorded.failed) == 2
