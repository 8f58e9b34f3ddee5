from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule import HALF, WAVE, plan
from pipeline.types import FramePlan, Item, Planned, VideoInfo


def request(number: int, video: int, context: int) -> Planned:
    uri = f"v{video}.mp4"
    info = VideoInfo(uri, 1, "1", "mp4", "h264", 1.0, 0.0, 8, True, 8.0, 56, 56, 0)
    return Planned(str(number), Item(uri, "?"), info, FramePlan((0.0,), 56, 56, 1.0, context), context)


pools = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), max_size=400).map(
    lambda pairs: tuple(request(i, video, context) for i, (video, context) in enumerate(pairs))
)


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_every_request_is_in_one_wave(pool: tuple[Planned, ...], slots: int) -> None:
    waves = plan(pool, slots)
    assert Counter(r.request_id for w in waves for r in w.requests) == Counter(r.request_id for r in pool)
    assert all(w.requests and w.max_num_seqs == slots for w in waves)


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_questions_on_a_video_lie_side_by_side_in_one_wave(pool: tuple[Planned, ...], slots: int) -> None:
    waves = plan(pool, slots)
    in_order = [(w, r.info.uri) for w, wave in enumerate(waves) for r in wave.requests]
    runs = [pair for i, pair in enumerate(in_order) if i == 0 or in_order[i - 1] != pair]
    assert len(runs) == len({r.info.uri for r in pool})


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_waves_are_full_and_alike(pool: tuple[Planned, ...], slots: int) -> None:
    waves = plan(pool, slots)
    for wave, following in pairwise(waves):
        assert len(wave.requests) <= WAVE * slots or len({r.info.uri for r in wave.requests}) == 1
        first = [r for r in following.requests if r.info.uri == following.requests[0].info.uri]
        assert len(wave.requests) >= HALF * slots or len(wave.requests) + len(first) > WAVE * slots
        assert max(r.context for r in wave.requests) >= max(r.context for r in following.requests)


@settings(deadline=None)
@given(pools, st.integers(1, 8))
def test_the_same_pool_gives_the_same_plan(pool: tuple[Planned, ...], slots: int) -> None:
    assert plan(pool, slots) == plan(tuple(pool), slots)


def test_longest_first_and_cut_where_contexts_change() -> None:
    pool = tuple(request(i, i, 100 if i % 2 else 4000) for i in range(2 * HALF))
    waves = plan(pool, 1)
    assert [{r.context for r in w.requests} for w in waves] == [{4000}, {100}]
    few = plan(pool[:4], 1)
    assert [r.context for r in few[0].requests] == [4000, 4000, 100, 100]
