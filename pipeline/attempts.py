"""What a decoder is handed and where it puts its frames; shared by the decoders and the process they run in.

Nothing here, or in what the decoders import, needs torch, so that the process starts fast.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

SLACK = 0.010  # s; at most a quarter of a frame: containers round their time stamps to a millisecond, GIF to ten


class DecodeError(Exception):
    """A reason for which an attempt ends, with its error code."""

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Job:
    """One attempt. Filled by `pipeline.frames`; plain values, since it travels as JSON."""

    source: str  # absolute local path, or URL where `remote`
    remote: bool
    times: tuple[float, ...]  # s from the first frame, ascending
    start: float  # s, the first frame's presentation time
    fps: float  # of the video, average
    height: int  # of the frames wanted
    width: int
    frame_bytes: int  # of a frame as it is stored, RGB
    size_bytes: int  # of the file
    target: str = ""  # where a download goes

    @property
    def slack(self) -> float:
        """s by which a frame may begin later than a planned time and still be the one that is meant."""
        return min(SLACK, 0.25 / self.fps)


class Sink:
    """Where a decoder puts its frames: one after another into shared memory, with room for all that are planned."""

    def __init__(self, memory: int, job: Job):
        self.memory, self.shape = memory, (job.height, job.width, 3)
        self.room = len(job.times)
        self.pts: list[float] = []
        os.ftruncate(memory, self.room * math.prod(self.shape))

    def put(self, at: float, image: np.ndarray) -> None:
        """A frame that begins `at` s after the first one; (height, width, 3) uint8 as the job wants them."""
        if len(self.pts) == self.room or image.shape != self.shape or image.dtype != np.uint8:
            raise DecodeError("decode_error", "it gave other frames than were planned")
        os.pwrite(self.memory, np.ascontiguousarray(image).data, len(self.pts) * image.size)
        self.pts.append(round(at, 6))

    def clear(self) -> None:
        """Forgets what was put, for a decoder that starts again."""
        self.pts.clear()


def resize(image: np.ndarray, height: int, width: int, rotation: int) -> np.ndarray:
    """Bicubic with antialiasing, as Hugging Face's video processors do it (at most one grey level apart), then turned
    counter-clockwise. (H, W, 3) uint8 to (height, width, 3) uint8."""
    size = (height, width) if rotation % 180 else (width, height)
    if image.shape[1::-1] != size:
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    return np.rot90(image, rotation // 90)
