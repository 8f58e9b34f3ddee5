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
    FramePlan,
    InputRow,
    PendingRequest,
    PlannedRequest,
    ProbedRequest,
    RequestError,
    UsageError,
    VideoInfo,
    Wave,
)
from std_core.cost_model.acceptance import AcceptanceCounts
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PrefillLatency,
    Profile,
)
from std_core.types import Draft, Result

LLAMA = ModelSize(
    32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    parameters=8_030_000_000,
)
GPU = Device("A100", kind="cuda", bandwidth=2e12, memory=80e9, flops=312e12)
FLAT = LatencyModel(1.0, 1e-3)
GOOD = CalibratedDraft(
    Draft("std", weights="int4"),
    FLAT,
    DraftSetupLatency(),
    (AcceptanceCounts(4096, "caption", (90,), (10,)),),
)
POOR = CalibratedDraft(
    Draft("random"), FLAT, DraftSetupLatency(), (AcceptanceCounts(4096, "caption", (60,), (40,)),)
)
PROFILE = Profile(
    GPU,
    model="m",
    dtype="bfloat16",
    model_size=LLAMA,
    latency=FLAT,
    prefill=PrefillLatency(0.0, 1e-4, 0.0),
    vision_s_per_token=1e-5,
    drafts=(GOOD, POOR),
)
HUGE = 10_000_000  # tokens that no device holds


def request(
    number: int, context: int = 4000, video: int | None = None, frames: int = 1
) -> PlannedRequest:
    uri = f"v{number if video is None else video}.mp4"
    info = VideoInfo(
        uri,
        size_bytes=1,
        version="1",
        container="mp4",
        codec="h264",
        duration=1.0,
        start=0.0,
        frames=8,
        exact=True,
        fps=8.0,
        height=56,
        width=56,
        rotation=0,
    )
    plan = FramePlan(tuple(map(float, range(frames))), height=56, width=56, fps=1.0, tokens=context)
    return PlannedRequest(
        str(number),
        input_row=InputRow(uri, "Describe."),
        info=info,
        frame_plan=plan,
        context=context,
    )


def failure(number: int) -> FailedRequest:
    return FailedRequest(
        PendingRequest(str(number), InputRow("w.mp4", "?")),
        RequestError("not_found", "w.mp4 is not there"),
    )


class Made:
    """`Prefetcher` whose thread is the test: what was made so far can be taken."""

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


class Seen:
    """A pool, and what it handed on."""

    def __init__(self, made: Made, config: WaveConfig | None = None):
        self.made = made
        self.failed: list[FailedRequest] = []
        self.waves: list[Wave] = []
        profile_on: Any = lambda device: replace(PROFILE, device=device)
        self.pool = RequestPool(
            made,
            on_failed=self.failed.append,
            on_wave=self.waves.append,
            profile_on=profile_on,
            config=config or WaveConfig(4),
        )
        self.pool.begin(GPU, 2)

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
turns = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30)


@settings(deadline=None, max_examples=60)
@given(batches, turns)
def test_whatever_comes_when_every_request_is_handed_out_once(
    drawn: list[list[tuple[str, int, int]]], turns: list[tuple[int, bool]]
) -> None:
    numbers = iter(range(10**6))
    make: dict[str, Any] = {
        "fits": lambda context, video: request(next(numbers), context, video),
        "fails": lambda context, video: failure(next(numbers)),
        "huge": lambda context, video: request(next(numbers), HUGE),
    }
    made = Made(
        [[make[what](context, video) for what, context, video in batch] for batch in drawn], ready=0
    )
    made.batches.append([request(next(numbers))])  # one at least fits
    seen = Seen(made)
    for arrived, engine_idle in [*turns, *[(9, True)] * 999]:
        made.ready += arrived
        seen.pool.take(engine_idle)
        if seen.pool.closed:
            break
    assert seen.pool.closed
    assert seen.names() == Counter(str(i) for i in range(next(numbers)))
    huge = {str(f.pending.request_id) for f in seen.failed if f.error.code == "out_of_memory"}
    assert len(huge) == sum(what == "huge" for batch in drawn for what, *_ in batch)


def test_few_requests_wait_for_more_of_their_kind_unless_somebody_is_hungry() -> None:
    made = Made([[request(i) for i in range(5)], [request(i) for i in range(5, 64)]], ready=1)
    seen = Seen(made)
    assert seen.pool.take(engine_idle=False) is None
    assert seen.pool.take(engine_idle=False) is None
    wave = seen.pool.take(engine_idle=True)
    assert wave is not None and 1 <= len(wave.requests) <= 5
    made.ready = 1
    wave = seen.pool.take(engine_idle=False)
    assert wave is not None and len(wave.requests) > 5


def test_a_full_pool_hands_out_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_REQUESTS", 8)
    made = Made([[request(i, 100 * 2**i) for i in range(8)], [request(9)]], ready=1)
    assert Seen(made).pool.take(engine_idle=False) is not None


def test_no_more_frames_are_pooled_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_FRAMES", 20)
    made = Made([[request(i, frames=8)] for i in range(30)])
    seen = Seen(made)
    wave = seen.pool.take(engine_idle=False)
    assert wave is not None and sum(len(r.frame_plan.times) for r in wave.requests) <= 20 + 8
    assert len(made.batches) >= 26
    while not seen.pool.closed:
        seen.pool.take(engine_idle=False)
    assert seen.names() == Counter(str(i) for i in range(30))


def test_where_nothing_fits_it_is_said_what_would_help() -> None:
    """Before an engine is asked for, if all headers are read by then."""
    listed: list[list[ProbedRequest]] = [[request(0, HUGE), failure(1)], [request(2, HUGE)]]
    with pytest.raises(UsageError, match=r"needs .* GB alone.* would help"):
        Seen(Made(listed))
    made = Made(listed, ready=1)
    seen = Seen(made)
    assert seen.pool.take(engine_idle=True) is None
    made.ready = 1
    with pytest.raises(UsageError, match=r"needs .* GB alone.* would help"):
        seen.pool.take(hungry=True)
    capacity = Capacity(PROFILE, WaveConfig(4))
    with pytest.raises(UsageError, match="would help"):
        split_by_capacity([request(0, HUGE)], capacity)
    fitting, failed = split_by_capacity([request(0, HUGE), request(1)], capacity)
    assert [r.request_id for r in fitting] == ["1"]
    assert [f.request_id for f in failed] == ["0"]


def test_what_waves_have_shown_decides_the_next_ones_draft() -> None:
    """The draft that looked best is refused throughout; the next wave has another."""
    seen = Seen(Made([[request(i) for i in range(200)]]))
    first = seen.pool.take(engine_idle=True)
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
        seen.pool.complete(first, results)
    second = seen.pool.take(engine_idle=True)
    assert second is not None and (second.draft is None or second.draft.weights != "int4")


def test_after_a_full_memory_waves_have_fewer_slots() -> None:
    seen = Seen(Made([[request(i) for i in range(300)]]))
    first = seen.pool.take(engine_idle=True)
    seen.pool.limit_slots(2)
    second = seen.pool.take(engine_idle=True)
    assert first is not None and second is not None
    assert (first.max_num_seqs, second.max_num_seqs) == (4, 2)


def test_nothing_runs_where_everything_has_failed_before() -> None:
    seen = Seen(Made([[failure(0)], [failure(1)]]))
    while seen.pool.poll():
        pass
    assert seen.pool.empty and seen.pool.closed and len(seen.failed) == 2
