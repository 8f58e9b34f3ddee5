"""Frames of a single video for a processor of transformers: for notebooks.

`processor.apply_chat_template` decodes video files with torchcodec only. This decodes them as a job
does, and needs nothing that the package does not install.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.records import FrameOptions, RequestError
from pipeline.video import frames
from pipeline.video.frame_plan import plan_frames
from pipeline.video.probe import probe
from std_core.types import Geometry

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata


class LoadedVideo(NamedTuple):
    """Sampled frames as transformers' processors take them.

    Args:
        frames: (T, height, width, 3) uint8, RGB, of the video's own size, upright.
        metadata: when each of them is shown; for the processor's `video_metadata`.
    """

    frames: np.ndarray
    metadata: VideoMetadata


def load_video(
    uri: str, fps: float = 2.0, num_frames: int | None = None, max_frames: int = 768
) -> LoadedVideo:
    """Decode evenly spaced frames of a video; the processor resizes them.

    The times are those that a job samples (`--fps`, `--nframes`): an even number of frames, from
    the first to the last one.

    Args:
        uri: a local path, or a URL that storage reads.
        fps: sampled frames per second; ignored if `num_frames` is given.
        num_frames: sampled frames in all.
        max_frames: most frames sampled by `fps`.

    Raises:
        RequestError: the file is missing, no video, or cannot be decoded; `code` says which.
        UsageError: an option is out of range.
    """
    # on first use: transformers takes seconds to import
    from std_core.model.checkpoint import video_metadata

    options = FrameOptions(
        fps=fps, nframes=num_frames, min_frames=min(4, max_frames), max_frames=max_frames
    )
    info = probe(uri)
    plan = replace(plan_frames(info, options, Geometry()), height=info.height, width=info.width)
    decoded = frames.decode(uri, info, plan)
    if decoded.frames_lost:
        raise RequestError(
            "truncated_file",
            f"{uri}: {decoded.frames_lost} of {len(plan.times)} sampled frames cannot be decoded",
        )
    metadata = video_metadata(len(decoded.pixels), decoded.fps, decoded.pts)
    return LoadedVideo(decoded.pixels, metadata)
