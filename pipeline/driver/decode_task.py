"""The Ray task that decodes one video.

It has a module of its own because the processes that run it must not import PyTorch, which takes
seconds and half a gigabyte in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import ray

from pipeline.records import FramePlan, Frames, RequestError, VideoInfo
from pipeline.video.frames import Limits

Decode = Callable[[str, VideoInfo, FramePlan, Limits], Frames]

NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)
# after so many videos a process is replaced, which frees the memory that decoders have leaked
MAX_DECODES_PER_PROCESS = 500


@ray.remote(num_cpus=1, num_returns=2, max_retries=0, max_calls=MAX_DECODES_PER_PROCESS)
def decode_video(
    decode: Decode, info: VideoInfo, plan: FramePlan, deadline: float
) -> tuple[Frames | RequestError, np.ndarray]:
    """Decode the planned frames of a video.

    Args:
        decode: `pipeline.video.frames.decode`, or a stub.
        deadline: seconds until the attempt is given up.

    Returns:
        The frames without their pixels, for the driver, and the pixels, (T, height, width, 3)
        uint8, for the engine. A failure is returned as a RequestError, never raised.
    """
    try:
        frames = decode(info.uri, info, plan, Limits(deadline=deadline))
    except RequestError as error:
        return error, NO_PIXELS
    return replace(frames, pixels=NO_PIXELS), frames.pixels
