"""Matches decoded frames with planned times.

A planned time gets the last frame that begins no later. It is resolved once a later frame, or the
end of the stream, shows which frame that is. Where that frame is damaged or missing the time is
marked as lost, instead of getting the frame before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from fractions import Fraction
from typing import Any

from pipeline.video.containers import quarter_turns
from pipeline.video.decode_job import DecodeJob, FrameBuffer, resize

SENT_PACKETS = 64  # packets whose times are remembered; codecs reorder 16 at most
_EPSILON = 1e-4  # s; shorter than any frame


class FrameMatcher:
    """Takes the frames of a stream in presentation order and fills a `FrameBuffer`.

    Only frames that resolve a planned time are converted and resized. All times are in seconds
    from the first frame.

    Args:
        job: names the planned times.
        buffer: where matched frames go.
        time_base: s per unit of the stream's time stamps.
        count_frames: frames are timed by counting them, see `containers.must_count_frames`.
        frame_per_packet: every packet gives one frame with the packet's time, so a time that was
            sent to the codec and did not come back is a missing frame.
    """

    def __init__(
        self,
        job: DecodeJob,
        buffer: FrameBuffer,
        time_base: Fraction,
        *,
        count_frames: bool,
        frame_per_packet: bool,
    ):
        self.job = job
        self.buffer = buffer
        self.time_base = time_base
        self.count_frames = count_frames
        self.frame_per_packet = frame_per_packet
        self.next_index = 0  # of the first planned time that is not resolved
        self.sent_pts: deque[float] = deque(maxlen=SENT_PACKETS)  # of packets the codec got
        self.seek_overshot = False  # the first frame after a seek begins after the next time
        self.newest_pts: float | None = None
        self._frame: Any = None  # the newest frame; None after a seek
        self._frame_stored = False  # whether that frame is in the buffer
        self._damaged_pts: list[float] = []
        self._check_overshoot = False  # no frame has come since a seek

    @property
    def done(self) -> bool:
        """Whether all planned times are resolved."""
        return self.next_index == len(self.job.times)

    def reset_after_seek(self, *, check_overshoot: bool) -> None:
        """Forgets the newest frame, which does not precede the frames behind a seek."""
        self._frame = None
        self._frame_stored = False
        self._check_overshoot = check_overshoot
        self.seek_overshot = False
        self.sent_pts.clear()

    def may_be_shown(self, pts: float) -> bool:
        """Whether a frame of this time may be the frame of a planned time: False if a packet that
        was sent lies between it and the next planned time."""
        times = self.job.times
        tolerance = self.job.tolerance
        index = bisect_left(times, pts - tolerance, self.next_index)
        if index == len(times):
            return False
        return not any(pts < other <= times[index] + tolerance for other in self.sent_pts)

    def add_damage(self, pts: float | None) -> None:
        """Notes that a frame could not be decoded; its time is None where it is unknown."""
        if self.count_frames:
            pts = self._counted_pts()
            self.newest_pts = pts
        if pts is not None:
            self._damaged_pts.append(pts)

    def add_frame(self, frame: Any) -> None:
        """Takes the next frame and resolves the planned times before it."""
        if self.count_frames or frame.pts is None:
            pts = self._counted_pts()
        else:
            pts = float(frame.pts * self.time_base) - self.job.start
        if self._check_overshoot and self._next_is_before(pts):
            self.seek_overshot = True
            return
        self._check_overshoot = False
        while self._next_is_before(pts):
            self.resolve_next()
        self.newest_pts = pts
        self._frame = frame
        self._frame_stored = False
        if frame.is_corrupt:
            self.add_damage(pts)

    def resolve_next(self) -> None:
        """Gives the next planned time the newest frame, or marks it as lost."""
        time = self.job.times[self.next_index]
        pts = self.newest_pts or 0.0
        self.next_index += 1
        if self._frame is None or self._lost_between(pts, time + self.job.tolerance):
            self.buffer.mark_lost()
        elif self._frame_stored:
            self.buffer.repeat_last()
        else:
            rotation = quarter_turns(self._frame.rotation)
            image = resize(self._frame, self.job.height, self.job.width, rotation)
            self.buffer.add(pts, image)
            self._frame_stored = True

    def finish(self) -> None:
        """Resolves the remaining times at the end of the stream: the last frame covers its
        duration and one frame more, later times are lost."""
        if self._frame is not None and self.newest_pts is not None:
            frame_s = 1 / self.job.fps
            duration = max(float((self._frame.duration or 0) * self.time_base), frame_s)
            end = self.newest_pts + duration + frame_s
            while not self.done and self.job.times[self.next_index] <= end:
                self.resolve_next()
        while not self.done:
            self.next_index += 1
            self.buffer.mark_lost()

    def _next_is_before(self, pts: float) -> bool:
        """Whether a planned time is left and a frame of this time begins after it."""
        return not self.done and self.job.times[self.next_index] + self.job.tolerance < pts

    def _counted_pts(self) -> float:
        """The time of the next frame where frames are counted."""
        return 0.0 if self.newest_pts is None else self.newest_pts + 1 / self.job.fps

    def _lost_between(self, pts: float, time: float) -> bool:
        """Whether a frame between the newest one and `time` is damaged or never left the codec."""
        if any(pts <= damaged <= time for damaged in self._damaged_pts):
            return True
        return self.frame_per_packet and any(
            pts + _EPSILON < sent <= time for sent in self.sent_pts
        )
