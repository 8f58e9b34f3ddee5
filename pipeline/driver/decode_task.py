"""The decode task, a thin shell around `pipeline.video.frames`. A file of its own, since the
processes that run it need no PyTorch, which takes seconds and half a gigabyte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import ray

from pipeline.records import FramePlan, Frames, RequestError, VideoInfo
from pipeline.video.frames import Limits

NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)
MAX_DECODES_PER_PROCESS = (
    500  # videos that a process decodes before another takes its place: what leaks is given back
)

Decode = Callable[[str, VideoInfo, FramePlan, Limits], Frames]


@ray.remote(num_cpus=1, num_returns=2, max_retries=0, max_calls=MAX_DECODES_PER_PROCESS)
def decode_video(
    decode: Decode, info: VideoInfo, plan: FramePlan, deadline: float
) -> tuple[Frames | RequestError, np.ndarray]:
    """What is known of a video's frames, small enough for the driver, and its pixels for the engine
    alone. A failure comes back as a value, never as an exception."""
    try:
        frames = decode(info.uri, info, plan, Limits(deadline=deadline))
    except RequestError as error:
        return error, NO_PIXELS
    return replace(frames, pixels=NO_PIXELS), frames.pixels
