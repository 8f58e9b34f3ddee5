"""One pass through a video with PyAV: the frames of planned times, by their time stamps.

A planned time gets the last frame that begins no later than it. Frames come by in presentation order, one at a time;
only those that settle a planned time are converted and resized. Damage is passed over and noted, so that a time whose
frame it hit counts as lost instead of getting the frame before.
"""

from __future__ import annotations

from typing import Any

import av

from pipeline.attempts import DecodeError, Job, Sink, resize
from pipeline.containers import BLOCK, Readable, counts_frames, index_end, open_container, quarter_turns, video_stream

INDEXED = frozenset(("mov", "matroska", "avi", "gif"))  # demuxers that can be trusted to find a key frame
REMOTE_SHARE = 0.5  # of a file; from here on it is downloaded instead of read in pieces


def read_through(source: str | Readable, demuxer: str, job: Job, sink: Sink) -> int:
    with open_container(source, demuxer) as container:
        stream = video_stream(container)
        if stream is None:
            raise DecodeError("no_video_stream", "it holds no video stream")
        stream.codec_context.thread_type = "NONE"
        if job.remote and _bytes_read(stream, job) >= REMOTE_SHARE * job.size_bytes:
            raise DecodeError("download", "most of it is needed")
        counting = counts_frames(demuxer, stream)
        lost, skipped = _pick(container, stream, job, _Seen(job, sink, counting), demuxer in INDEXED and not counting)
        if lost and skipped and not job.remote:  # some streams decode from their key frames only after a while
            sink.clear()
            container.seek(0)
            lost, _ = _pick(container, stream, job, _Seen(job, sink, counting), False)
        if lost == len(job.times) and index_end(stream) > job.size_bytes:
            raise DecodeError("truncated_file", "the file ends before its frames do")
        return lost


def _pick(container: Any, stream: Any, job: Job, seen: _Seen, skip: bool) -> tuple[int, bool]:
    """Runs once through the stream; if `skip`, from key frame to key frame where the index shows a way. Returns how
    many planned times were lost, and whether anything was skipped."""
    depth, skipped = stream.codec_context.reorder_depth, False
    while not seen.done:
        key = _key_before(stream, job, job.times[seen.next]) if skip else None
        if key is not None and key > (seen.at or 0.0) + _margin(stream, job):
            container.seek(round((key + job.start) / stream.time_base), stream=stream, backward=True)
            stream.codec_context.reorder_depth = depth  # which the seek made FFmpeg forget
            seen.restart()
            skipped = True
        if not _advance(container, stream, job, seen):
            break
    return seen.finish(), skipped


def _advance(container: Any, stream: Any, job: Job, seen: _Seen) -> bool:
    """Decodes up to the frame that settles the next planned time. False at the end of the stream."""
    goal = seen.next
    try:
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                seen.hole(None if packet.pts is None else float(packet.pts * packet.time_base) - job.start)
                continue
            for frame in frames:
                seen.show(frame)
            if seen.next > goal:
                return True
    except av.error.FFmpegError:
        seen.hole(None)  # the container itself breaks off here
    return False


class _Seen:
    """Which planned times are settled, as frames come by in presentation order."""

    def __init__(self, job: Job, sink: Sink, counting: bool):
        self.job, self.sink, self.counting = job, sink, counting
        self.next = 0  # the first planned time that is not settled
        self.lost = 0
        self.at: float | None = None  # s, of the newest frame
        self.held: Any = None  # that frame, if it is good
        self.handed = False  # whether it was handed on already
        self.holes: list[float] = []

    @property
    def done(self) -> bool:
        return self.next == len(self.job.times)

    def restart(self) -> None:
        """After a seek the frame held is no neighbour of the next one."""
        self.held, self.handed = None, False

    def hole(self, at: float | None) -> None:
        """A frame could not be decoded; `at` is its time in s, if known."""
        if self.counting:
            self.at = at = self._counted()
        if at is not None:
            self.holes.append(at)

    def show(self, frame: Any) -> None:
        """The next frame in presentation order: settles the planned times that lie before it."""
        if self.counting or frame.pts is None:
            at = self._counted()
        else:
            at = float(frame.pts * frame.time_base) - self.job.start
        while not self.done and self.job.times[self.next] + self.job.slack < at:
            self._settle(self.job.times[self.next])
        self.at, self.held, self.handed = at, frame, False
        if frame.is_corrupt:
            self.hole(at)

    def _counted(self) -> float:
        return 0.0 if self.at is None else self.at + 1 / self.job.fps

    def finish(self) -> int:
        """Settles what the last frame covers; everything after it is lost. Returns how many times were lost."""
        reach = -1.0
        if self.held is not None and self.at is not None:
            shown = float((self.held.duration or 0) * self.held.time_base)
            reach = self.at + max(shown, 1 / self.job.fps) + 1 / self.job.fps
        while not self.done and self.job.times[self.next] <= reach:
            self._settle(self.job.times[self.next])
        self.lost += len(self.job.times) - self.next
        return self.lost

    def _settle(self, time: float) -> None:
        self.next += 1
        at = self.at or 0.0
        if self.held is None or any(at <= hole <= time + self.job.slack for hole in self.holes):
            self.lost += 1
        elif not self.handed:
            picture = self.held.to_ndarray(format="rgb24")
            turn = quarter_turns(self.held.rotation)
            self.sink.put(at, resize(picture, self.job.height, self.job.width, turn))
            self.handed = True


def _margin(stream: Any, job: Job) -> float:
    """s by which the index, which is in decoding order, may lag behind presentation."""
    return (stream.codec_context.reorder_depth + 1) / job.fps


def _key_before(stream: Any, job: Job, time: float) -> float | None:
    """The last key frame that is surely shown before a planned time, in s; None if the index shows none."""
    entries = stream.index_entries
    stamp = round((time + job.start - _margin(stream, job)) / stream.time_base)
    number = entries.search_timestamp(stamp, backward=True) if len(entries) else -1
    return None if number < 0 else float(entries[number].timestamp * stream.time_base) - job.start


def _bytes_read(stream: Any, job: Job) -> int:
    """Bytes that decoding the planned times reads, at least one block each way; the whole file without an index."""
    entries = stream.index_entries
    if len(entries) < 2 or stream.frames == 0:
        return job.size_bytes
    needed: set[int] = set()
    for time in job.times:
        late = round((time + job.start + _margin(stream, job)) / stream.time_base)
        early = round((time + job.start - _margin(stream, job)) / stream.time_base)
        last = entries.search_timestamp(late, backward=True, any_frame=True)
        needed.update(range(max(0, entries.search_timestamp(early, backward=True)), max(0, last) + 1))
    spans = [(entries[number].pos, entries[number].pos + entries[number].size) for number in needed]
    return len({block for begin, end in spans for block in range(begin // BLOCK, end // BLOCK + 1)}) * BLOCK
