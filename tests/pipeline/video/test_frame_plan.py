"""Qwen's sampling rules; token counts equal to those of Hugging Face's processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from pipeline.records import FrameOptions, RequestError, VideoInfo
from pipeline.video.frame_plan import plan_frames
from std_core.types import Geometry

SMALL = Geometry(min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28)


def video(frames: int = 300, fps: float = 30.0, height: int = 240, width: int = 320) -> VideoInfo:
    return VideoInfo(
        "x.mp4",
        size_bytes=1,
        version="1",
        container="mp4",
        codec="h264",
        duration=frames / fps,
        start=0.0,
        frames=frames,
        exact=True,
        fps=fps,
        height=height,
        width=width,
        rotation=0,
    )


@pytest.mark.parametrize("scenes", range(1, 13))
def test_the_demo_clips_get_four_samples_per_scene(scenes: int) -> None:
    plan = plan_frames(video(frames=16 * scenes, fps=8), FrameOptions(), SMALL)
    assert [int(time // 2) for time in plan.times] == [
        scene for scene in range(scenes) for _ in range(4)
    ]
    assert plan.fps == 2


@pytest.mark.parametrize(
    ("frames", "options", "count"),
    [
        (300, FrameOptions(), 20),
        (300, FrameOptions(fps=0.1), 4),  # min_frames
        (300, FrameOptions(fps=30, max_frames=33), 32),
        (300, FrameOptions(nframes=7), 8),
        (300, FrameOptions(nframes=5), 4),  # halves go to the even multiple
        (300, FrameOptions(nframes=1000), 300),
        (301, FrameOptions(nframes=1000), 300),
        (300, FrameOptions(video_start=5, video_end=8), 6),
        (300, FrameOptions(video_start=5), 10),
        (3, FrameOptions(), 2),
        (1, FrameOptions(), 1),
        (1, FrameOptions(nframes=16), 1),
        (300, FrameOptions(min_frames=1, max_frames=1), 2),
    ],
)
def test_number_of_samples(frames: int, options: FrameOptions, count: int) -> None:
    assert len(plan_frames(video(frames), options, SMALL).times) == count


def test_one_frame_costs_a_whole_temporal_patch() -> None:
    plan = plan_frames(video(frames=1, height=112, width=112), FrameOptions(), SMALL)
    assert (plan.times, plan.tokens) == ((0.0,), 16)


def test_a_part_without_frames_is_an_error() -> None:
    with pytest.raises(RequestError) as raised:
        plan_frames(video(), FrameOptions(video_start=11), SMALL)
    assert raised.value.code == "too_few_frames"
    assert "10 s" in raised.value.message


def test_extreme_aspect_ratios_are_an_error() -> None:
    with pytest.raises(RequestError) as raised:
        plan_frames(video(height=8, width=8000), FrameOptions(), SMALL)
    assert raised.value.code == "invalid_request"


parts = st.tuples(st.none() | st.floats(0, 200), st.none() | st.floats(0.1, 200))


@settings(max_examples=400, deadline=None)
@given(
    frames=st.integers(1, 20_000),
    video_fps=st.sampled_from([1, 8, 12.5, 24000 / 1001, 25, 30000 / 1001, 60, 120]),
    fps=st.floats(0.01, 60),
    nframes=st.none() | st.integers(1, 1000),
    bounds=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    part=parts,
    sides=st.tuples(st.integers(16, 3000), st.integers(16, 3000)),
    pixels=st.tuples(st.integers(1, 2_000_000), st.integers(1, 2_000_000)),
    total=st.none() | st.integers(1, 10**9),
    patch=st.sampled_from([1, 2, 4]),
)
def test_invariants_of_any_plan(
    frames: int,
    video_fps: float,
    fps: float,
    nframes: int | None,
    bounds: tuple[int, int],
    part: tuple[float | None, float | None],
    sides: tuple[int, int],
    pixels: tuple[int, int],
    total: int | None,
    patch: int,
) -> None:
    start, end = part
    if end is not None and end <= (start or 0):
        end = (start or 0) + end
    options = FrameOptions(
        fps,
        nframes=nframes,
        min_frames=min(bounds),
        max_frames=max(bounds),
        min_pixels=min(pixels),
        max_pixels=max(pixels),
        total_pixels=total,
        video_start=start,
        video_end=end,
    )
    geometry = Geometry(temporal_patch_size=patch)
    info = video(frames, video_fps, *sides)
    first = math.ceil((start or 0) * video_fps - 1e-6)
    last = frames - 1
    last = last if end is None else min(last, math.floor(end * video_fps + 1e-6))
    if max(sides) > 200 * min(sides):
        return
    if first > last:
        with pytest.raises(RequestError, match="no frame"):
            plan_frames(info, options, geometry)
        return
    plan = plan_frames(info, options, geometry)
    count = len(plan.times)
    assert 1 <= count <= last - first + 1
    assert count % patch == 0 or count == last - first + 1 < patch
    assert all(a < b for a, b in zip(plan.times, plan.times[1:], strict=False))
    assert (start or 0) - 1e-6 <= plan.times[0]
    assert plan.times[-1] <= min((frames - 1) / video_fps, math.inf if end is None else end) + 1e-6
    if nframes is None:
        assert count <= max(options.max_frames, patch)
    assert plan.height % 28 == plan.width % 28 == 0
    assert plan.tokens == -(-count // patch) * (plan.height // 28) * (plan.width // 28)
    highest = options.max_pixels
    if total is not None:
        highest = min(highest, max(total * patch // count, int(1.05 * options.min_pixels)))
    highest = max(highest, options.min_pixels)
    # only sides of one factor, and rounding up to the minimum, may exceed the budget
    grown = (math.sqrt(options.min_pixels * max(sides) / min(sides)) + 28) * (
        math.sqrt(options.min_pixels * min(sides) / max(sides)) + 28
    )
    assert plan.height * plan.width <= max(highest, grown) or 28 in (plan.height, plan.width)


def grid(processor: Qwen2VLVideoProcessor, frames: np.ndarray, **options: object) -> int:
    out = processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], return_tensors="pt", **options
    )
    return int(out["video_grid_thw"].prod()) // processor.merge_size**2


@pytest.mark.parametrize(
    "sides", [(240, 320), (320, 240), (144, 176), (97, 351), (720, 1280), (30, 700)]
)
@pytest.mark.parametrize("count", [1, 2, 6])
def test_token_counts_equal_the_qwen2_processors(sides: tuple[int, int], count: int) -> None:
    size = {"shortest_edge": 16 * 28 * 28, "longest_edge": 128 * 28 * 28}
    processor = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    options = FrameOptions(
        nframes=count, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
    )
    plan = plan_frames(video(count, 2, *sides), options, Geometry())
    assert len(plan.times) == count
    assert plan.tokens == grid(processor, np.zeros((count, *sides, 3), np.uint8))


@pytest.mark.parametrize("budget", [100, 400, 3000])
def test_total_pixels_is_shared_like_in_the_qwen2_processor(budget: int) -> None:
    size = {"shortest_edge": 16 * 28 * 28, "longest_edge": 128 * 28 * 28}
    processor = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=True, max_video_tokens=budget)
    total = int(budget * 28 * 28 * 0.9)
    plan = plan_frames(
        video(8, 2, 480, 640),
        FrameOptions(
            nframes=8,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
            total_pixels=total,
        ),
        Geometry(),
    )
    assert plan.tokens == grid(processor, np.zeros((8, 480, 640, 3), np.uint8))


@pytest.mark.parametrize("sides", [(240, 320), (97, 351), (720, 1280)])
@pytest.mark.parametrize("count", [2, 6, 40])
def test_a_pixel_budget_per_video_is_shared_like_in_the_qwen3_processor(
    sides: tuple[int, int], count: int
) -> None:
    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 600 * 32 * 32}
    processor = Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=True, max_video_tokens=64)
    cap = 64 * 32 * 32
    geometry = Geometry(
        patch_size=16, min_pixels=32 * 32, max_pixels=cap, video_pixels=size["longest_edge"]
    )
    plan = plan_frames(video(count, 2, *sides), FrameOptions(nframes=count), geometry)
    out = processor(
        videos=[torch.zeros(count, 3, *sides, dtype=torch.uint8)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert plan.tokens == int(out["video_grid_thw"].prod()) // 4


@pytest.mark.parametrize("sides", [(240, 320), (30, 700), (384, 384)])
def test_a_fixed_frame_size_overrides_the_options(sides: tuple[int, int]) -> None:
    geometry = Geometry(
        14,
        temporal_patch_size=1,
        merge_size=1,
        frame=(384, 384),
        frame_tokens=196,
        closing_tokens=1,
    )
    plan = plan_frames(video(60, 10, *sides), FrameOptions(nframes=7, max_pixels=56 * 56), geometry)
    assert (plan.height, plan.width) == (384, 384)
    assert plan.tokens == 7 * 196 + 1
