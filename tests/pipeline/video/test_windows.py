"""Windows of long videos: their limits, their request ids, and decoding several in one pass."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Job, parse_job
from pipeline.intake.requests import (
    RequestStream,
)
from pipeline.plan import waves
from pipeline.records import (
    FrameOptions,
    FramePlan,
    Frames,
    InputRow,
    PendingRequest,
    PlannedRequest,
    RequestError,
    UsageError,
    VideoInfo,
)
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import close_workers
from pipeline.video.windows import (
    MAX_SPAN_WINDOWS,
    MAX_WINDOWS,
    frames_of_window,
    group_into_spans,
    merge_plans,
    split_into_windows,
)
from std_core.types import Geometry

GEOMETRY = Geometry(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28)


@pytest.fixture(scope="module", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    close_workers()


def video(seconds: float = 100.0, fps: float = 10.0, uri: str = "/v.mp4") -> VideoInfo:
    return VideoInfo(
        uri,
        size_bytes=1,
        version="1",
        container="mp4",
        codec="h264",
        duration=seconds,
        start=0.0,
        frames=round(seconds * fps),
        exact=True,
        fps=fps,
        height=240,
        width=320,
        rotation=0,
    )


def planned(
    info: VideoInfo, window: tuple[float, float] | None, name: str = "", context: int = 10
) -> PlannedRequest:
    plan = plan_frames(info, FrameOptions(), GEOMETRY, window)
    return PlannedRequest(
        name or f"{window}",
        input_row=InputRow(info.uri, "?"),
        info=info,
        frame_plan=plan,
        context=context,
        window=window,
    )


# ------------------------------------------------------------------------------------ window limits


@pytest.mark.parametrize(
    ("seconds", "overlap", "found"),
    [
        (40, 0, [(0, 40), (40, 80), (80, 100)]),
        (50, 0, [(0, 50), (50, 100)]),
        (48, 0, [(0, 48), (48, 100)]),  # the rest of 4 s extends the last window
        (40, 10, [(0, 40), (30, 70), (60, 100)]),
        (100, 0, [(0, 100)]),
        (1000, 0, [(0, 100)]),
    ],
)
def test_windows_cover_the_video(
    seconds: float, overlap: float, found: list[tuple[float, float]]
) -> None:
    assert list(split_into_windows(video(), FrameOptions(), seconds, overlap)) == found


def test_windows_stay_inside_the_chosen_part() -> None:
    options = FrameOptions(video_start=10, video_end=50)
    assert list(split_into_windows(video(), options, 20, 0)) == [(10, 30), (30, 50)]
    assert list(split_into_windows(video(), replace(options, video_end=500.0), 45, 0)) == [
        (10, 55),
        (55, 100),
    ]


@given(
    st.floats(allow_nan=True, allow_infinity=True, min_value=None),
    st.floats(1e-6, 1e6),
    st.floats(0, 0.99),
)
def test_a_claimed_duration_makes_no_list(duration: float, seconds: float, overlap: float) -> None:
    info = replace(video(), duration=duration)
    try:
        windows = split_into_windows(info, FrameOptions(), seconds, overlap * seconds)
    except RequestError as error:
        assert error.code == "too_large" and "--window-seconds" in error.message  # noqa: PT017
        assert not duration <= (MAX_WINDOWS - 1) * seconds * (1 - overlap)
    else:
        assert not isinstance(windows, list) and next(windows)[0] == 0
        assert duration <= (MAX_WINDOWS + 1) * seconds


def test_the_largest_number_of_windows_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 20_000
    monkeypatch.setattr("pipeline.video.windows.MAX_WINDOWS", limit)
    info = replace(video(), duration=float(limit))
    tracemalloc.start()
    number = sum(1 for _ in split_into_windows(info, FrameOptions(), 1.0, 0.0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert number == limit and peak < 16 << 10
    with pytest.raises(RequestError, match="raise --window-seconds"):
        split_into_windows(replace(info, duration=limit + 1.0), FrameOptions(), 1.0, 0.0)


@settings(deadline=None)
@given(
    st.floats(0.2, 500),
    st.floats(0.5, 200),
    st.floats(0, 0.9),
    st.sampled_from([8.0, 23.976, 30.0]),
)
def test_windows_without_overlap_partition_the_frames(
    length: float, seconds: float, overlap: float, fps: float
) -> None:
    info = video(max(1, round(length * fps)) / fps, fps)
    found = list(split_into_windows(info, FrameOptions(), seconds, overlap * seconds))
    assert found[0][0] == 0
    assert found[-1][1] == info.duration
    assert all(
        a[0] < b[0] <= a[1] + 1e-6 < b[1] + 2e-6 or b is found[-1] for a, b in pairwise(found)
    )
    if not overlap and seconds * fps >= 1:
        every = FrameOptions(fps=fps, min_frames=1, max_frames=10**6)
        single = replace(GEOMETRY, temporal_patch_size=1)
        times = [t for window in found for t in plan_frames(info, every, single, window).times]
        assert len(times) == len(set(times))
        assert abs(len(times) - info.frames) <= len(found)  # counts are rounded down


# ---------------------------------------------------------------------------------- request ids


def test_each_window_has_its_own_request_id(clips: Path) -> None:
    item = InputRow(str(clips / "v.mp4"), "a")

    def pending(job: Job) -> list[PendingRequest]:
        return list(
            RequestStream([item, replace(item, prompt="b")], job, "r", set()).pending(frozenset())
        )

    plain = {p.request_id for p in pending(Job())}
    cut = pending(Job(window_seconds=2.0))
    assert [p.window for p in cut] == 2 * [(0, 2), (2, 4), (4, 5)]
    names = {p.request_id for p in cut}
    assert (len(plain), len(names)) == (2, 6)
    for other in (Job(window_seconds=2.0, window_overlap=0.5), Job(window_seconds=2.5)):
        assert not {p.request_id for p in pending(other)} & (names | plain)
    assert {p.request_id for p in pending(Job(window_seconds=2.0, window_overlap=0.0))} == names


def test_an_unreadable_video_is_one_request_without_a_window(
    clips: Path,
) -> None:
    bad = clips / "later.mp4"

    def first() -> PendingRequest:
        found = list(
            RequestStream([InputRow(str(bad), "a")], Job(window_seconds=2.0), "r", set()).pending(
                frozenset()
            )
        )
        return found[0]

    bad.write_bytes(b"")
    assert isinstance(first().info, RequestError)
    assert first().window is None


def test_window_flags_are_validated() -> None:
    job = parse_job(["--input", "x", "--window-seconds", "30", "--window-overlap", "5"], "test")
    assert (job.window_seconds, job.window_overlap) == (30.0, 5.0)
    for words in (
        ["--window-seconds", "0"],
        ["--window-overlap", "1"],
        ["--window-seconds=2", "--window-overlap=2"],
    ):
        with pytest.raises(UsageError, match="--window-"):
            parse_job(["--input", "x", *words], "test")


# -------------------------------------------------------------------------------------------- spans


def test_only_neighbouring_windows_of_one_video_share_a_span() -> None:
    info = video()
    other = video(uri="/w.mp4")
    halves = [planned(info, (k * 10.0, k * 10.0 + 10), f"{k}") for k in range(10)]
    names = [[r.request_id for r in span.requests] for span in group_into_spans(halves)]
    assert names == [
        [str(k) for k in range(MAX_SPAN_WINDOWS)],
        [str(k) for k in range(MAX_SPAN_WINDOWS, 10)],
    ]
    mixed = [
        halves[0],
        halves[1],
        halves[3],
        planned(other, (0.0, 10.0), "x"),
        planned(other, None, "y"),
    ]
    assert [[r.request_id for r in span.requests] for span in group_into_spans(mixed)] == [
        ["0", "1"],
        ["3"],
        ["x"],
        ["y"],
    ]
    twice = [halves[0], replace(halves[0], request_id="again"), halves[1]]
    [span] = group_into_spans(twice)
    assert (len(span.requests), span.plan.windows) == (3, 2)
    assert span.plan.times == (*halves[0].frame_plan.times, *halves[1].frame_plan.times)


def test_waves_keep_windows_in_order() -> None:
    info = video()
    requests = [
        planned(info, (k * 10.0, k * 10.0 + 10), f"{k}{p}", 10 + k) for p in "ab" for k in range(3)
    ]
    [wave] = waves.split_into_waves(
        (*requests, planned(video(uri="/w.mp4"), None, "w", 11)), lambda _: 8
    )
    assert [r.request_id for r in wave] == ["0a", "0b", "1a", "1b", "2a", "2b", "w"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 s of noise at 24 frames a second, in an MP4 and in a transport stream without an index."""
    folder = tmp_path_factory.mktemp("windows")
    rng = np.random.default_rng(1)
    still = rng.integers(0, 256, (120, 6, 8, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    for name, container in (("v.mp4", "mp4"), ("v.ts", "mpegts")):
        with av.open(str(folder / name), "w", format=container) as out:
            stream = out.add_stream("libx264", rate=24, options={"g": "24", "bf": "2"})
            stream.height = 96
            stream.width = 128
            stream.pix_fmt = "yuv420p"
            for number, image in enumerate(still):
                frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")
                frame.pts = number
                frame.time_base = Fraction(1, 24)
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
    return folder


@pytest.mark.parametrize("name", ["v.mp4", "v.ts"])
@pytest.mark.parametrize("overlap", [0.0, 0.7])
def test_a_span_decodes_to_the_same_frames_as_its_windows(
    clips: Path, name: str, overlap: float
) -> None:
    uri = str(clips / name)
    info = probe(uri)
    plans = [
        plan_frames(info, FrameOptions(fps=3), GEOMETRY, w)
        for w in split_into_windows(info, FrameOptions(), 2.0, overlap)
    ]
    assert len({(plan.height, plan.width) for plan in plans}) == 1
    whole = merge_plans(plans)
    together = decode(uri, info, whole)
    for plan in plans:
        own, numbers = frames_of_window(together, whole, plan)
        alone = decode(uri, info, plan)
        assert isinstance(own, Frames)
        assert (own.pts, own.fps, own.frames_lost) == (alone.pts, alone.fps, 0)
        assert np.array_equal(together.pixels[list(numbers)], alone.pixels)


def test_lost_frames_count_for_their_window_only() -> None:
    plans = [
        FramePlan(times, height=28, width=28, fps=1.0, tokens=1)
        for times in ((0.0, 1.0), (2.0, 3.0), (4.0,))
    ]
    whole = merge_plans(plans)
    frames = Frames(
        np.empty(0),
        pts=(0.0, 1.0, 2.0),
        fps=1.0,
        frames_lost=2,
        rotation=0,
        decoder="pyav",
        frame_indices=(0, 1, 2, -1, -1),
    )
    first, second, third = (frames_of_window(frames, whole, plan) for plan in plans)
    assert isinstance(first[0], Frames) and (first[0].frames_lost, first[1]) == (0, (0, 1))
    assert isinstance(second[0], Frames) and (second[0].frames_lost, second[0].pts) == (1, (2.0,))
    assert isinstance(third[0], RequestError) and third[0].code == "zero_frames"
