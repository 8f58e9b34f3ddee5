"""Windows of long videos: one request each. Neighbouring windows are decoded in one pass.

One pass over several windows never reads more than a pass for each. It opens the file once, still
seeks from key frame to key frame where frames are far apart, and decodes only once what windows
share and what lies between a key frame and a window's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from pipeline.records import (
    FrameOptions,
    FramePlan,
    Frames,
    PlannedRequest,
    RequestError,
    VideoInfo,
)
from pipeline.video.decode_job import LOST

MAX_SPAN_BYTES = 256 << 20  # decoded frames of one pass
MAX_SPAN_WINDOWS = 8  # windows of one pass, so that other CPU cores get work too
MAX_WINDOWS = 1_000_000  # of one video; a year in windows of half a minute
MIN_REST = 0.1  # of a window; a shorter rest of the video extends the last window

Window = tuple[float, float]  # s, start (inclusive) and end (exclusive)


def split_into_windows(
    info: VideoInfo, options: FrameOptions, seconds: float, overlap: float
) -> Iterator[Window]:
    """Cuts the chosen part of a video into windows, at least one, each made when it is taken.

    Args:
        options: name the part, by `video_start` and `video_end`.
        seconds: length of each window but the last, which ends with the part.
        overlap: s that a window shares with the one before.

    Raises:
        RequestError: `too_large` for more than `MAX_WINDOWS` windows, before the first one.
    """
    start = options.video_start or 0.0
    end = info.duration if options.video_end is None else min(options.video_end, info.duration)
    step = seconds - overlap
    if not end - start <= MAX_WINDOWS * step:  # a duration of NaN is refused, too
        raise RequestError(
            "too_large",
            f"{end - start:.6g} s in windows of {seconds:g} s, which begin {step:g} s apart, are "
            f"more than {MAX_WINDOWS:,} windows: raise --window-seconds, or choose a part with "
            "--video-start and --video-end",
        )
    return _windows(start, end, seconds, step)


def _windows(start: float, end: float, seconds: float, step: float) -> Iterator[Window]:
    last = start
    for number in count(1):
        if last + seconds + MIN_REST * seconds >= end:
            break
        yield last, last + seconds
        last = start + number * step
    yield last, max(end, last + 1e-3)


@dataclass(frozen=True)
class Span:
    """Requests whose frames are decoded in one pass, and the plan of that pass."""

    requests: tuple[PlannedRequest, ...]
    plan: FramePlan

    @property
    def nbytes(self) -> int:
        """Size of all frames of the pass."""
        return len(self.plan.times) * self.plan.height * self.plan.width * 3


def group_into_spans(requests: Iterable[PlannedRequest]) -> Iterator[Span]:
    """Groups requests that need the same frames, or frames of neighbouring windows of one video.

    Spans come in the order of their first requests.
    """
    by_frames: dict[str, list[PlannedRequest]] = {}
    for request in requests:
        by_frames.setdefault(request.frames_key, []).append(request)
    members: list[list[PlannedRequest]] = []  # of the span being built, one list per window
    for group in by_frames.values():
        if members and not _fits(members, group):
            yield _make_span(members)
            members = []
        members.append(group)
    if members:
        yield _make_span(members)


def _fits(members: Sequence[list[PlannedRequest]], group: list[PlannedRequest]) -> bool:
    """Whether a group of requests on one window may join a span."""
    last = members[-1][0]
    new = group[0]
    if len(members) == MAX_SPAN_WINDOWS or not _are_neighbours(last, new):
        return False
    return _make_span([*members, group]).nbytes <= MAX_SPAN_BYTES


def _are_neighbours(last: PlannedRequest, new: PlannedRequest) -> bool:
    """Whether the new request's window touches or overlaps the last one's, in the same video and
    with frames of the same size."""
    if last.window is None or new.window is None:
        return False
    if (last.info.uri, last.info.version) != (new.info.uri, new.info.version):
        return False
    last_plan = last.frame_plan
    new_plan = new.frame_plan
    if (last_plan.height, last_plan.width) != (new_plan.height, new_plan.width):
        return False
    last_start, last_end = last.window
    new_start, _ = new.window
    return last_start < new_start <= last_end + 1e-6


def _make_span(members: Sequence[Sequence[PlannedRequest]]) -> Span:
    plans = [group[0].frame_plan for group in members]
    return Span(tuple(request for group in members for request in group), merge_plans(plans))


def merge_plans(plans: Sequence[FramePlan]) -> FramePlan:
    """The plan of one pass over several windows, with each sample time once."""
    if len(plans) == 1:
        return plans[0]
    times = tuple(sorted({time for plan in plans for time in plan.times}))
    tokens = sum(plan.tokens for plan in plans)
    return replace(plans[0], times=times, tokens=tokens, windows=len(plans))


def frames_of_window(
    frames: Frames, span_plan: FramePlan, plan: FramePlan
) -> tuple[Frames | RequestError, tuple[int, ...]]:
    """Selects one window's frames from those of a pass.

    Args:
        frames: of the pass; its pixels are neither read nor selected here.
        span_plan: the plan of the pass.
        plan: the plan of the window.

    Returns:
        The window's frames without their pixels, and their indices among the frames of the pass.
        Instead of the frames an error: `zero_frames` if there are none, `truncated_file` if under
        half of the planned ones are intact.
    """
    if span_plan.windows == 1:
        return frames, tuple(range(len(frames.pts)))
    index_at = dict(zip(span_plan.times, frames.frame_indices, strict=True))
    span_indices = [index_at[time] for time in plan.times]
    selected = tuple(sorted({index for index in span_indices if index != LOST}))
    lost = span_indices.count(LOST)
    planned = len(span_indices)
    if not selected:
        return RequestError("zero_frames", "no frame of this part of the video was found"), ()
    if 2 * (planned - lost) < planned:
        message = f"of this part of the video only {planned - lost} of {planned} frames are intact"
        return RequestError("truncated_file", message), ()
    window_index = {index: position for position, index in enumerate(selected)}
    window_frames = replace(
        frames,
        pts=tuple(frames.pts[index] for index in selected),
        fps=plan.fps,
        frames_lost=lost,
        frame_indices=tuple(window_index.get(index, LOST) for index in span_indices),
    )
    return window_frames, selected
