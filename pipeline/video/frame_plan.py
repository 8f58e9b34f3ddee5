"""Which moments of a video are looked at, and at which size: a pure function of its headers.

The rules are Qwen's. Frames: `fps` or `nframes`, in multiples of the temporal patch, evenly from
the first to the last frame of the chosen part. Size: sides are multiples of the patch × merge size,
pixels between a minimum and a maximum, and `total_pixels`, given or the model's, is shared evenly
by the frames. A model that knows one frame size only gets that."""

from __future__ import annotations

import math

from pipeline.records import FrameOptions, FramePlan, RequestError, VideoInfo
from std_core.types import Geometry

MAX_ASPECT = 200  # longer strips make no sense to any of the models


def plan_frames(
    info: VideoInfo,
    options: FrameOptions,
    geometry: Geometry,
    window: tuple[float, float] | None = None,
) -> FramePlan:
    """The sample of one video, or of a `window` of it (s, without the moment it ends), fixed before
    a frame is decoded.

    Its times count from the first frame's presentation time, ascend, are unique and lie inside the
    chosen part; there are never more of them than frames in that part. Where the part holds less
    than one temporal patch, the model's processor repeats the last frame.

    Raises: RequestError: `too_few_frames` where the chosen part holds no frame; `invalid_request`
        for a frame more than
            200 times as long as wide.
    """
    first, last = _part(info, options) if window is None else _window(info, window)
    count = _count(last - first + 1, info.fps, options, geometry.temporal_patch_size)
    height, width = _size(info, count, options, geometry)
    return FramePlan(
        times=tuple(index / info.fps for index in _spread(first, last, count)),
        height=height,
        width=width,
        fps=count / (last - first + 1) * info.fps,
        tokens=geometry.tokens(count, height, width),
    )


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Sides nearest to the frame's shape that are multiples of `factor`, their product between the
    bounds (one `factor` a side at least, which may exceed `max_pixels`). All in pixels."""
    near_height, near_width = (
        max(factor, round(side / factor) * factor) for side in (height, width)
    )
    if near_height * near_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )  # type: ignore[return-value]
    if near_height * near_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return near_height, near_width


def _part(info: VideoInfo, options: FrameOptions) -> tuple[int, int]:
    """First and last frame number of the chosen part."""
    first = math.ceil((options.video_start or 0) * info.fps - 1e-6)
    last = info.frames - 1
    if options.video_end is not None:
        last = min(last, math.floor(options.video_end * info.fps + 1e-6))
    if first > last:
        raise RequestError(
            "too_few_frames", f"no frame {_described(info, options)}; choose another part"
        )
    return first, last


def _window(info: VideoInfo, window: tuple[float, float]) -> tuple[int, int]:
    """First and last frame number of a window; a frame at its end is the next one's."""
    first = math.ceil(window[0] * info.fps - 1e-6)
    last = min(info.frames, math.ceil(window[1] * info.fps - 1e-6)) - 1
    if first > last:
        raise RequestError(
            "too_few_frames", f"no frame lies between {window[0]:g} s and {window[1]:g} s"
        )
    return first, last


def _described(info: VideoInfo, options: FrameOptions) -> str:
    end = "the end" if options.video_end is None else f"{options.video_end:g} s"
    return f"lies between {options.video_start or 0:g} s and {end}: the video has {info.frames} in {info.duration:g} s"


def _count(existing: int, video_fps: float, options: FrameOptions, patch: int) -> int:
    """How many of the part's frames are sampled: a multiple of `patch` wherever that many exist."""
    if options.nframes is not None:
        wanted = float(round(options.nframes / patch) * patch)
    else:
        lowest = math.ceil(options.min_frames / patch) * patch
        highest = min(options.max_frames, existing) // patch * patch
        wanted = min(max(existing / video_fps * options.fps, lowest), highest)
    whole = math.floor(min(wanted, existing) / patch + 1e-9) * patch
    return whole or min(existing, patch)


def _spread(first: int, last: int, count: int) -> list[int]:
    """`count` frame numbers, evenly from `first` to `last`; unique, since there are at least as
    many."""
    if count == 1:
        return [first]
    return [first + round(k * (last - first) / (count - 1)) for k in range(count)]


def _size(
    info: VideoInfo, count: int, options: FrameOptions, geometry: Geometry
) -> tuple[int, int]:
    """Height and width of the frames handed to the model, in pixels."""
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
    if total is not None:
        share = total * geometry.temporal_patch_size // count
        highest = min(highest, max(share, int(lowest * 1.05)))
    if geometry.video_pixels is not None:
        highest = min(highest, max(geometry.video_pixels // count, int(lowest * 1.05)))
    return smart_resize(height, width, geometry.factor, lowest, max_pixels=max(lowest, highest))
