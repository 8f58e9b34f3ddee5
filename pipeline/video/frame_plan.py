"""Chooses sample times and frame size of a video, from its headers alone.

The rules are Qwen's. Number of frames: by `fps` or `nframes`, a multiple of the temporal patch,
evenly from the first to the last frame of the chosen part. Size: sides are multiples of patch size
× merge size, and pixels lie between a minimum and a maximum; `total_pixels`, given or the model's
own, is shared evenly by the frames. A model with one fixed frame size gets that size.
"""

from __future__ import annotations

import math

from pipeline.records import FrameOptions, FramePlan, RequestError, VideoInfo
from std_core.types import Geometry

MAX_ASPECT = 200  # the limit of Qwen's `smart_resize`


def plan_frames(
    info: VideoInfo,
    options: FrameOptions,
    geometry: Geometry,
    window: tuple[float, float] | None = None,
) -> FramePlan:
    """Plans the sample of one video.

    Sample times count from the first frame's presentation time, ascend, are unique and lie inside
    the chosen part. There are never more of them than the part has frames. If the part has fewer
    than one temporal patch, the model's processor repeats the last frame.

    Args:
        window: s, start (inclusive) and end (exclusive); replaces `options.video_start` and
            `options.video_end`.

    Raises:
        RequestError: `too_few_frames` if the chosen part holds no frame; `invalid_request` for
            frames more than 200 times as long as wide.
    """
    if window is None:
        first, last = _frame_range(info, options)
    else:
        first, last = _window_range(info, window)
    available = last - first + 1
    count = _num_samples(available, info.fps, options, geometry.temporal_patch_size)
    height, width = _frame_size(info, count, options, geometry)
    return FramePlan(
        times=tuple(number / info.fps for number in _evenly_spaced(first, last, count)),
        height=height,
        width=width,
        fps=count / available * info.fps,
        tokens=geometry.tokens(count, height, width),
    )


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Qwen's `smart_resize`: height and width nearest to the frame's shape.

    Both are multiples of `factor`, at least one each; their product lies between the bounds, unless
    the smallest sides exceed `max_pixels`. All in pixels.
    """
    near_height = max(factor, round(height / factor) * factor)
    near_width = max(factor, round(width / factor) * factor)
    if near_height * near_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if near_height * near_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return near_height, near_width


def _frame_range(info: VideoInfo, options: FrameOptions) -> tuple[int, int]:
    """First and last frame number of the part that the options choose."""
    first = math.ceil((options.video_start or 0) * info.fps - 1e-6)
    last = info.frames - 1
    if options.video_end is not None:
        last = min(last, math.floor(options.video_end * info.fps + 1e-6))
    if first > last:
        end = "the end" if options.video_end is None else f"{options.video_end:g} s"
        raise RequestError(
            "too_few_frames",
            f"no frame lies between {options.video_start or 0:g} s and {end}: the video has "
            f"{info.frames} in {info.duration:g} s; choose another part",
        )
    return first, last


def _window_range(info: VideoInfo, window: tuple[float, float]) -> tuple[int, int]:
    """First and last frame number of a window; a frame at its end belongs to the next window."""
    start, end = window
    first = math.ceil(start * info.fps - 1e-6)
    last = min(info.frames, math.ceil(end * info.fps - 1e-6)) - 1
    if first > last:
        raise RequestError("too_few_frames", f"no frame lies between {start:g} s and {end:g} s")
    return first, last


def _num_samples(
    available: int, video_fps: float, options: FrameOptions, temporal_patch: int
) -> int:
    """The number of frames to sample: a multiple of the temporal patch if that many exist."""
    if options.nframes is not None:
        wanted = float(round(options.nframes / temporal_patch) * temporal_patch)
    else:
        lowest = math.ceil(options.min_frames / temporal_patch) * temporal_patch
        highest = min(options.max_frames, available) // temporal_patch * temporal_patch
        wanted = min(max(available / video_fps * options.fps, lowest), highest)
    count = math.floor(min(wanted, available) / temporal_patch + 1e-9) * temporal_patch
    return count or min(available, temporal_patch)


def _evenly_spaced(first: int, last: int, count: int) -> list[int]:
    """`count` frame numbers from `first` to `last`; unique, since the range holds as many."""
    if count == 1:
        return [first]
    return [first + round(k * (last - first) / (count - 1)) for k in range(count)]


def _frame_size(
    info: VideoInfo, count: int, options: FrameOptions, geometry: Geometry
) -> tuple[int, int]:
    """Height and width of `count` sampled frames, in pixels."""
    height = info.height
    width = info.width
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(
            "invalid_request", f"frames of {width}×{height} are too long and thin for the model"
        )
    if geometry.frame is not None:
        return geometry.frame
    lowest = geometry.min_pixels if options.min_pixels is None else options.min_pixels
    highest = geometry.max_pixels if options.max_pixels is None else options.max_pixels
    total = geometry.total_pixels if options.total_pixels is None else options.total_pixels
    lowest_share = int(lowest * 1.05)  # a shared budget never cuts a frame below this
    if total is not None:
        share = total * geometry.temporal_patch_size // count
        highest = min(highest, max(share, lowest_share))
    if geometry.video_pixels is not None:
        highest = min(highest, max(geometry.video_pixels // count, lowest_share))
    return smart_resize(height, width, geometry.factor, lowest, max_pixels=max(lowest, highest))
