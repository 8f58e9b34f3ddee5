"""One pass through a video with PyAV: the frames of planned times, by their time stamps.

A planned time gets the last frame that begins no later than it. Frames come by in presentation
order, one at a time; only those that settle a planned time are converted and resized. Damage is
passed over and noted, so that a time whose frame it hit counts as lost instead of getting the frame
before.

Three things save work. Where the index shows a key frame well ahead, the pass goes there. Before it
leaves a place, it stops at the last frame that it needs, and lets the codec give out what it holds.
And of H.264, frames that no other frame refers to are not decoded unless a planned time shows them.
Whatever is lost along such short cuts is looked for again without them."""

from __future__ import annotations

import importlib
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from fractions import Fraction
from typing import Any

import av

from pipeline.video.containers import (
    BLOCK,
    Readable,
    counts_frames,
    index_end,
    open_container,
    quarter_turns,
    video_stream,
)
from pipeline.video.decode_job import DecodeError, DecodeJob, FrameBuffer, demuxer_of, resize

INDEXED = frozenset(
    ("mov", "matroska", "avi", "gif")
)  # demuxers that can be trusted to find a key frame
REMOTE_SHARE = 0.5  # of a file; from here on it is downloaded instead of read in pieces
RECENT = 64  # packets that are remembered; codecs reorder 16 at the most
SMALL = 4 * BLOCK  # bytes; a remote file as small as this is downloaded, whatever is needed of it
_TICK = 1e-4  # s; below any frame's duration


def decode(job: DecodeJob, buffer: FrameBuffer) -> None:
    """Frames through PyAV, from a local path or, in pieces, from object storage; what is damaged is
    passed over.

    Raises:
        DecodeError: `download` where reading in pieces would read half of a remote file or more.
    """
    if not job.remote:
        read_through(job.source, demuxer_of(job.source), job, buffer)
        return
    if job.size_bytes <= SMALL:
        raise DecodeError("download", "it is small")
    storage = importlib.import_module("pipeline.storage")
    with storage.open_read(job.source, BLOCK) as reader:
        read_through(reader, demuxer_of(job.source, reader), job, buffer)


def read_through(source: str | Readable, demuxer: str, job: DecodeJob, buffer: FrameBuffer) -> None:
    """Settles all planned times of a video.

    Raises: DecodeError: `download` where reading in pieces would read half of a remote file or
        more; `no_video_stream`;
            `truncated_file` where none of the frames is there.
        av.error.FFmpegError: it cannot be opened.
    """
    with open_container(source, demuxer) as container:
        stream = video_stream(container)
        if stream is None:
            raise DecodeError("no_video_stream", "it holds no video stream")
        stream.codec_context.thread_type = "NONE"
        if job.remote and _bytes_read(stream, job) >= REMOTE_SHARE * job.size_bytes:
            raise DecodeError("download", "most of it is needed")
        counting = counts_frames(demuxer, stream)
        short = _Pass(
            container,
            stream=stream,
            job=job,
            seen=_Seen(job, buffer, counting, stream.time_base),
            skip=demuxer in INDEXED and not counting,
        )
        short.run()
        if (
            buffer.num_lost and short.cut and not job.remote
        ):  # some streams decode from their key frames only after a while
            buffer.clear()
            container.seek(0)
            stream.codec_context.skip_frame = "DEFAULT"
            _Pass(
                container,
                stream=stream,
                job=job,
                seen=_Seen(job, buffer, counting, stream.time_base),
                skip=False,
            ).run()
        if buffer.num_lost == len(job.times) and index_end(stream) > job.size_bytes:
            raise DecodeError("truncated_file", "the file ends before its frames do")


class _Pass:
    """One way through the stream: `skip` if from key frame to key frame where the index shows a
    way."""

    def __init__(self, container: Any, stream: Any, job: DecodeJob, seen: _Seen, skip: bool):
        self.container = container
        self.stream = stream
        self.job = job
        self.seen = seen
        self.skip = skip
        self.codec = stream.codec_context
        self.depth = self.codec.reorder_depth
        self.margin = (
            self.depth + 1
        ) / job.fps  # s by which a key frame's time in the index may precede its showing
        self.lag: float | None = None  # s by which it does, once that is known
        self.stored = skip and container.format.name.startswith(
            "mov"
        )  # decoding times are the file's, not guessed
        self.thin = skip and self.codec.name == "h264"
        seen.exact = self.stored and self.codec.name in ("h264", "hevc")
        self.drained = False  # the codec gave out everything, so it can only go on behind a seek
        self.cut = False  # whether anything was passed over

    def run(self) -> None:
        # again: the planned time for which a seek went too far
        seen = self.seen
        again = -1
        while not seen.done:
            goal = seen.next
            time = self.job.times[seen.next]
            key = self._key_before(time) if self.skip else None
            if goal != again and (
                self.drained or (key is not None and self._ahead(key, seen.at or 0.0))
            ):
                self._go(time)
            if self._advance(time, self._leaves()):
                continue
            if not seen.missed:
                break
            self._back(key, time)
            again = goal
        seen.finish()

    def _ahead(self, key: float, at: float) -> bool:
        """Whether going to a key frame reads less than going on."""
        return key > at + (self.margin if self.lag is None else 1 / self.job.fps)

    def _leaves(self) -> bool:
        """Whether nothing behind the next planned time is needed here."""
        times = self.job.times
        goal = self.seen.next
        if not self.stored:
            return False
        if goal + 1 == len(times):
            return True
        key = self._key_before(times[goal + 1])
        return key is not None and self._ahead(key, times[goal])

    def _key_before(self, time: float) -> float | None:
        """When the last key frame is shown before a planned time, in s; None if the index shows
        none. It may be a little later, which a seek finds out."""
        entries = self.stream.index_entries
        back = self.margin if self.lag is None else self.lag - self.job.slack
        number = entries.search_timestamp(
            round((time + self.job.start - back) / self.stream.time_base), backward=True
        )
        if number < 0:
            return None
        return (
            float(entries[number].timestamp * self.stream.time_base)
            - self.job.start
            + (self.lag or 0.0)
        )

    def _go(self, time: float) -> None:
        """To the last key frame that is not shown after `time`."""
        stamp = round((time + self.job.start + self.job.slack) / self.stream.time_base)
        self.container.seek(stamp, stream=self.stream, backward=True)
        self.codec.reorder_depth = self.depth  # which the seek made FFmpeg forget
        self.seen.restart(sought=True)
        self.drained = False
        self.cut = True

    def _back(self, key: float | None, time: float) -> None:
        """Where a seek came out behind the planned time: to the key frame before it."""
        self._go((time if key is None else min(key, time)) - self.margin)
        self.seen.sought = False

    def _advance(self, time: float, leaves: bool) -> bool:
        """Decodes up to the frame that settles the planned `time`, and if it `leaves`, no further.
        False at the end of the stream, or where a seek went too far."""
        seen = self.seen
        goal = self.seen.next
        ahead = []
        latest = time + self.job.slack
        try:
            for packet in self.container.demux(self.stream):
                begins = self._time(packet.pts)
                dts = self._time(packet.dts)
                if self.lag is None and self.stored and begins is not None and dts is not None:
                    self.lag = begins - dts
                if leaves and dts is not None and dts > latest:
                    return self._drain(goal)
                if leaves and begins is not None and begins > latest:
                    ahead.append(packet)  # the frame that is looked for may refer to it
                    continue
                for one in (*ahead, packet):
                    self._decode(one)
                ahead.clear()
                if seen.missed:
                    return False
                if seen.next > goal:
                    return True
        except av.error.FFmpegError:
            seen.hole(None)  # the container itself breaks off here
            self._rest(ahead)
        return False

    def _rest(self, ahead: list[Any]) -> None:
        """What was read before the container broke off, and what the codec still holds."""
        with suppress(av.error.FFmpegError):
            for packet in ahead:
                self._decode(packet)
            for frame in self.codec.decode(None):
                self.seen.show(frame)

    def _time(self, stamp: int | None) -> float | None:
        return None if stamp is None else float(stamp * self.stream.time_base) - self.job.start

    def _decode(self, packet: Any) -> None:
        begins = self._time(packet.pts)
        if begins is not None:
            if self.thin:
                unseen = not self.seen.may_show(begins)
                self.codec.skip_frame = "NONREF" if unseen else "DEFAULT"
                self.cut = self.cut or unseen
            self.seen.sent.append(begins)
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            self.seen.hole(begins)
            return
        for frame in frames:
            self.seen.show(frame)

    def _drain(self, goal: int) -> bool:
        """Everything that is shown up to the planned time was sent: settles it by what the codec
        still holds."""
        try:
            for frame in self.codec.decode(None):
                self.seen.show(frame)
        except av.error.InvalidDataError:
            self.seen.hole(None)
        self.drained = True
        if self.seen.missed:
            return False
        if self.seen.next == goal:
            self.seen.settle()
        return True


class _Seen:
    """Which planned times are settled, as frames come by in presentation order."""

    def __init__(self, job: DecodeJob, buffer: FrameBuffer, counting: bool, tick: Fraction):
        self.job = job
        self.buffer = buffer
        self.counting = counting
        self.tick = tick
        self.exact = False  # whether a frame carries the time of its packet
        self.next = 0  # the first planned time that is not settled
        self.at: float | None = None  # s, of the newest frame
        self.held: Any = None  # that frame, if it is good
        self.handed = False  # whether it was handed on already
        self.holes: list[float] = []
        self.sent: deque[float] = deque(maxlen=RECENT)  # s, of the packets that the codec got
        self.sought = self.missed = False  # no frame yet since a seek; it came out too late

    @property
    def done(self) -> bool:
        return self.next == len(self.job.times)

    def restart(self, sought: bool) -> None:
        """After a seek the frame held is no neighbour of the next one."""
        self.held = None
        self.handed = False
        self.sought = sought
        self.missed = False
        self.sent.clear()

    def may_show(self, begins: float) -> bool:
        """Whether a frame that begins then may be the one that a planned time shows: whether none
        is known that begins between it and the time."""
        times = self.job.times
        slack = self.job.slack
        number = bisect_left(times, begins - slack, self.next)
        return number < len(times) and not any(
            begins < other <= times[number] + slack for other in self.sent
        )

    def hole(self, at: float | None) -> None:
        """A frame could not be decoded; `at` is its time in s, if known."""
        if self.counting:
            self.at = at = self._counted()
        if at is not None:
            self.holes.append(at)

    def show(self, frame: Any) -> None:
        """The next frame in presentation order: settles the planned times that lie before it."""
        timed = not self.counting and frame.pts is not None
        at = float(frame.pts * self.tick) - self.job.start if timed else self._counted()
        if self.sought and not self.done and self.job.times[self.next] + self.job.slack < at:
            self.missed = True
            return
        self.sought = False
        while not self.done and self.job.times[self.next] + self.job.slack < at:
            self.settle()
        self.at = at
        self.held = frame
        self.handed = False
        if frame.is_corrupt:
            self.hole(at)

    def _counted(self) -> float:
        return 0.0 if self.at is None else self.at + 1 / self.job.fps

    def finish(self) -> None:
        """Settles what the last frame covers; everything after it is lost."""
        reach = -1.0
        if self.held is not None and self.at is not None:
            shown = float((self.held.duration or 0) * self.tick)
            reach = self.at + max(shown, 1 / self.job.fps) + 1 / self.job.fps
        while not self.done and self.job.times[self.next] <= reach:
            self.settle()
        while not self.done:
            self.next += 1
            self.buffer.mark_lost()

    def settle(self) -> None:
        """The next planned time shows the frame held."""
        time = self.job.times[self.next]
        at = self.at or 0.0
        self.next += 1
        if self.held is None or self._covered(at, time + self.job.slack):
            self.buffer.mark_lost()
        elif self.handed:
            self.buffer.repeat_last()
        else:
            turn = quarter_turns(self.held.rotation)
            self.buffer.add(at, resize(self.held, self.job.height, self.job.width, turn))
            self.handed = True

    def _covered(self, at: float, time: float) -> bool:
        """Whether damage, or a frame that never came out of the codec, lies between the frame held
        and `time`."""
        missing = self.exact and any(at + _TICK < sent <= time for sent in self.sent)
        return missing or any(at <= hole <= time for hole in self.holes)


def _bytes_read(stream: Any, job: DecodeJob) -> int:
    """Bytes that decoding the planned times reads, at least one block each way; the whole file
    without an index."""
    entries = stream.index_entries
    if len(entries) < 2 or stream.frames == 0:
        return job.size_bytes
    margin = (stream.codec_context.reorder_depth + 1) / job.fps
    needed: set[int] = set()
    for time in job.times:
        late, early = (
            round((time + job.start + side * margin) / stream.time_base) for side in (1, -1)
        )
        last = entries.search_timestamp(late, backward=True, any_frame=True)
        needed.update(
            range(max(0, entries.search_timestamp(early, backward=True)), max(0, last) + 1)
        )
    spans = [(entries[number].pos, entries[number].pos + entries[number].size) for number in needed]
    return (
        len({block for begin, end in spans for block in range(begin // BLOCK, end // BLOCK + 1)})
        * BLOCK
    )
