"""What a decoder is handed and where it puts its frames; shared by the decoders and the process
they run in.

Nothing here, or in what the decoders import, needs torch, so that the process starts fast.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import av
import numpy as np

from pipeline.video.containers import HEAD, Readable, sniff

# s; at most a quarter of a frame: containers round their time stamps to a millisecond, GIF to ten
SLACK = 0.010


class DecodeError(Exception):
    """A reason for which an attempt ends, with its error code."""

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class DecodeJob:
    """One attempt. Filled by `pipeline.video.frames`; plain values, since it travels as JSON."""

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
        """s by which a frame may begin later than a planned time and still be the one that is
        meant."""
        return min(SLACK, 0.25 / self.fps)


class FrameBuffer:
    """Where a decoder puts what it finds, planned time by planned time: frames one after another
    into shared memory, with room for all that are planned, and for each time which of them it
    shows.

    Attributes:
        pts: s from the first frame, of the frames that were put.
        frame_indices: per planned time, in order, the number of its frame, or -1 where it is lost.
    """

    def __init__(self, memory: int, job: DecodeJob):
        self.memory = memory
        self.shape = (job.height, job.width, 3)
        self.room = len(job.times)
        self.pts: list[float] = []
        self.frame_indices: list[int] = []
        os.ftruncate(memory, self.room * math.prod(self.shape))

    def add(self, at: float, image: np.ndarray) -> None:
        """The next planned time's frame, which begins `at` s after the first one; (height, width,
        3) uint8."""
        if (
            len(self.frame_indices) == self.room
            or image.shape != self.shape
            or image.dtype != np.uint8
        ):
            raise DecodeError("decode_error", "it gave other frames than were planned")
        os.pwrite(self.memory, np.ascontiguousarray(image).data, len(self.pts) * image.size)
        self.pts.append(round(at, 6))
        self.frame_indices.append(len(self.pts) - 1)

    def repeat_last(self) -> None:
        """The next planned time shows the frame that was put last."""
        self.frame_indices.append(len(self.pts) - 1)

    def mark_lost(self) -> None:
        """The next planned time's frame is missing or damaged."""
        self.frame_indices.append(-1)

    @property
    def num_lost(self) -> int:
        """Planned times without a frame so far, those that no decoder came to included."""
        return self.room - len(self.frame_indices) + self.frame_indices.count(-1)

    def clear(self) -> None:
        """Forgets everything, for a decoder that starts again."""
        self.pts.clear()
        self.frame_indices.clear()


def demuxer_of(source: str, reader: Readable | None = None) -> str:
    """The demuxer of a file, by its first bytes: the file may have changed since it was probed."""
    if reader is None:
        with open(source, "rb") as local:
            known = sniff(local.read(HEAD))
    else:
        known = sniff(reader.read(HEAD))
        reader.seek(0)
    if known is None:
        raise DecodeError("not_a_video", "it does not begin like a video")
    return known[0]


def resize(image: np.ndarray | av.VideoFrame, height: int, width: int, rotation: int) -> np.ndarray:
    """Bicubic with antialiasing, then turned counter-clockwise. A frame, or (H, W, 3) uint8, to
    (height, width, 3).

    Each colour by itself, in FFmpeg's scaler: that takes a third of the time that Hugging Face's
    resize does, from which it differs by 0.3 grey levels on average and by 2 at most in 99 of 100
    values of real footage. Straight from YUV it would take half of that, but colours would bleed by
    half a pixel."""
    frame = (
        av.VideoFrame.from_ndarray(image, format="rgb24")
        if isinstance(image, np.ndarray)
        else image
    )
    wide, high = (height, width) if rotation % 180 else (width, height)
    if (frame.width, frame.height) == (wide, high):
        return np.rot90(frame.to_ndarray(format="rgb24"), rotation // 90)
    scaled = frame.reformat(format="gbrp").reformat(
        width=wide, height=high, interpolation="BICUBIC"
    )
    return np.rot90(scaled.to_ndarray(format="rgb24"), rotation // 90)
