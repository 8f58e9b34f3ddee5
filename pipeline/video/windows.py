"""Windows of long videos: one request each, named apart; neighbours are decoded in one pass over
the file.

One pass never reads more than several: it goes from key frame to key frame where frames are far
apart, opens the file once, and reads what windows share, and what lies between a key frame and a
window's start, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.records import (
    FrameOptions,
    FramePlan,
    Frames,
    PlannedRequest,
    RequestError,
    VideoInfo,
)

SPAN_BYTES = 256 << 20  # of frames that one pass hands on
MAX_SPAN_WINDOWS = (
    8  # windows that one pass decodes at most, so that other processors have work too
)
REST = 0.1  # of a window: a shorter rest at the end belongs to the window before

Window = tuple[float, float]  # s, start and end; the end is the first moment behind it


def split_into_windows(
    info: VideoInfo, options: FrameOptions, seconds: float, overlap: float
) -> list[Window]:
    """The windows of the chosen part of a video, each `seconds` long and beginning `overlap` s
    before the end of the one before; the last one ends with the part. At least one."""
    start = options.video_start or 0.0
    end = info.duration if options.video_end is None else min(options.video_end, info.duration)
    step = seconds - overlap
    found = [start]
    while found[-1] + seconds + REST * seconds < end:
        found.append(start + len(found) * step)
    return [(begin, begin + seconds) for begin in found[:-1]] + [
        (found[-1], max(end, found[-1] + 1e-3))
    ]


@dataclass(frozen=True)
class Span:
    """Requests whose frames are decoded in one pass, and what that pass is to find."""

    requests: tuple[PlannedRequest, ...]
    plan: FramePlan

    @property
    def nbytes(self) -> int:
        """Of all its frames."""
        return len(self.plan.times) * self.plan.height * self.plan.width * 3


def group_into_spans(requests: Iterable[PlannedRequest]) -> Iterator[Span]:
    """Requests that share a video, or are about neighbouring windows of one, in the order in which
    they first come."""
    groups: dict[str, list[PlannedRequest]] = {}
    for request in requests:
        groups.setdefault(request.frames_key, []).append(request)
    members: list[list[PlannedRequest]] = []
    for group in groups.values():
        if members and (
            not _together(members, group[0]) or _of([*members, group]).nbytes > SPAN_BYTES
        ):
            yield _of(members)
            members = []
        members.append(group)
    if members:
        yield _of(members)


def _together(members: Sequence[Sequence[PlannedRequest]], new: PlannedRequest) -> bool:
    """Whether a window goes on where the last one ends, with frames of the same size."""
    last = members[-1][0]
    if last.window is None or new.window is None or len(members) == MAX_SPAN_WINDOWS:
        return False
    same = (last.info.uri, last.info.version) == (new.info.uri, new.info.version)
    sizes = (last.frame_plan.height, last.frame_plan.width) == (
        new.frame_plan.height,
        new.frame_plan.width,
    )
    return same and sizes and last.window[0] < new.window[0] <= last.window[1] + 1e-6


def _of(members: Sequence[Sequence[PlannedRequest]]) -> Span:
    plans = [group[0].frame_plan for group in members]
    return Span(tuple(request for group in members for request in group), merge_plans(plans))


def merge_plans(plans: Sequence[FramePlan]) -> FramePlan:
    """One pass's plan for several windows: each moment once."""
    if len(plans) == 1:
        return plans[0]
    times = tuple(sorted({time for plan in plans for time in plan.times}))
    return replace(
        plans[0], times=times, tokens=sum(plan.tokens for plan in plans), windows=len(plans)
    )


def frames_of_window(
    frames: Frames, whole: FramePlan, plan: FramePlan
) -> tuple[Frames | RequestError, tuple[int, ...]]:
    """Of a pass's frames those of one of its windows: what is known of them, and their numbers
    among all.

    Args:
        frames: of the pass; pixels are neither needed nor handed on.
        whole, plan: the pass's plan and the window's.

    Returns: An error `truncated_file` where under half of the window's moments have a frame,
        `zero_frames` where none has.
    """
    if whole.windows == 1:
        return frames, tuple(range(len(frames.pts)))
    number_of = dict(zip(whole.times, frames.frame_indices, strict=True))
    frame_indices = [number_of[time] for time in plan.times]
    numbers = tuple(sorted({number for number in frame_indices if number >= 0}))
    lost = frame_indices.count(-1)
    if not numbers:
        return RequestError("zero_frames", "no frame of this part of the video was found"), ()
    if 2 * (len(frame_indices) - lost) < len(frame_indices):
        intact = f"only {len(frame_indices) - lost} of {len(frame_indices)} frames are intact"
        return RequestError("truncated_file", f"of this part of the video {intact}"), ()
    pts = tuple(frames.pts[number] for number in numbers)
    own = {number: place for place, number in enumerate(numbers)}
    told = tuple(own.get(number, -1) for number in frame_indices)
    return replace(frames, pts=pts, fps=plan.fps, frames_lost=lost, frame_indices=told), numbers
