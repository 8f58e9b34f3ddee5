"""The PyAV decoder: one pass through a video. Runs inside a decoding process.

Frames are matched with the planned times by their time stamps (`frame_matcher`) and pass through
one at a time. Damaged frames are skipped and noted. Three short cuts save work:

- The pass seeks to a key frame where the index shows one far enough ahead.
- Before a seek it stops at the last frame that it needs and drains the codec.
- In H.264, frames that no other frame refers to are decoded only if a planned time may need them.

If planned times are lost on a pass with short cuts, a local file is read again without them.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import av

from pipeline.video.containers import (
    BLOCK,
    INDEXED,
    Readable,
    index_end,
    must_count_frames,
    open_container,
    video_stream,
)
from pipeline.video.decode_job import DecodeError, DecodeJob, FrameBuffer, demuxer_of
from pipeline.video.frame_matcher import FrameMatcher

MAX_REMOTE_SHARE = 0.5  # of a remote file; if more is needed, the file is downloaded
MIN_REMOTE_BYTES = 4 * BLOCK  # smaller remote files are downloaded, whatever is needed


def decode(job: DecodeJob, buffer: FrameBuffer) -> None:
    """Decodes the planned frames from a local path or, by range requests, from object storage.

    Raises:
        DecodeError: `download` for a remote file of which half or more is needed; `not_a_video`;
            `no_video_stream`; `truncated_file` where the file holds none of the frames.
        av.error.FFmpegError: the file cannot be opened.
    """
    if not job.remote:
        decode_from(job.source, demuxer_of(job.source), job, buffer)
        return
    if job.size_bytes <= MIN_REMOTE_BYTES:
        raise DecodeError("download", "the file is small")
    storage = importlib.import_module("pipeline.storage")  # slow to import
    with storage.open_read(job.source, BLOCK) as reader:
        decode_from(reader, demuxer_of(job.source, reader), job, buffer)


def decode_from(source: str | Readable, demuxer: str, job: DecodeJob, buffer: FrameBuffer) -> None:
    """Decodes the planned frames from a local path or an open file. Raises as `decode` does."""
    with open_container(source, demuxer) as container:
        stream = video_stream(container)
        if stream is None:
            raise DecodeError("no_video_stream", "it holds no video stream")
        stream.codec_context.thread_type = "NONE"
        if job.remote and bytes_to_read(stream, job) >= MAX_REMOTE_SHARE * job.size_bytes:
            raise DecodeError("download", "most of the file is needed")
        count_frames = must_count_frames(demuxer, stream)
        decode_pass = DecodePass(
            container,
            stream,
            job,
            buffer,
            count_frames=count_frames,
            shortcuts=demuxer in INDEXED and not count_frames,
        )
        decode_pass.run()
        if buffer.num_lost and decode_pass.took_shortcut and not job.remote:
            # some streams decode cleanly only some frames behind a key frame
            buffer.clear()
            container.seek(0)
            stream.codec_context.skip_frame = "DEFAULT"
            decode_pass = DecodePass(
                container, stream, job, buffer, count_frames=count_frames, shortcuts=False
            )
            decode_pass.run()
        if buffer.num_lost == len(job.times) and index_end(stream) > job.size_bytes:
            raise DecodeError("truncated_file", "the file ends before its frames do")


def bytes_to_read(stream: Any, job: DecodeJob) -> int:
    """An estimate, in whole blocks, of the bytes that the planned frames need, each from its key
    frame on; the size of the file where there is no index."""
    entries = stream.index_entries
    if len(entries) < 2 or stream.frames == 0:
        return job.size_bytes
    margin = (stream.codec_context.reorder_depth + 1) / job.fps
    needed: set[int] = set()  # index entries
    for time in job.times:
        earliest = round((time + job.start - margin) / stream.time_base)
        latest = round((time + job.start + margin) / stream.time_base)
        key_frame = max(0, entries.search_timestamp(earliest, backward=True))
        last = max(0, entries.search_timestamp(latest, backward=True, any_frame=True))
        needed.update(range(key_frame, last + 1))
    blocks: set[int] = set()
    for number in needed:
        entry = entries[number]
        blocks.update(range(entry.pos // BLOCK, (entry.pos + entry.size) // BLOCK + 1))
    return len(blocks) * BLOCK


class DecodePass:
    """One pass through a video stream, from start to end.

    Times are in seconds from the first frame. The index of MP4 and MOV stores decoding times (DTS);
    a frame's presentation time (PTS) lies later by an offset that the first packet shows.

    Args:
        count_frames: frames are timed by counting them, see `containers.must_count_frames`.
        shortcuts: whether to seek, drain early and skip frames, as the module describes.

    Attributes:
        took_shortcut: whether any part of the stream was skipped.
    """

    def __init__(
        self,
        container: Any,
        stream: Any,
        job: DecodeJob,
        buffer: FrameBuffer,
        *,
        count_frames: bool,
        shortcuts: bool,
    ):
        self.container = container
        self.stream = stream
        self.job = job
        self.shortcuts = shortcuts
        self.took_shortcut = False
        self.codec = stream.codec_context
        self.reorder_depth = self.codec.reorder_depth
        self.max_pts_offset = (self.reorder_depth + 1) / job.fps
        self.pts_offset: float | None = None  # PTS - DTS, once known
        is_mov = container.format.name.startswith("mov")
        self.has_exact_dts = shortcuts and is_mov  # other demuxers guess decoding times
        self.skips_unreferenced = shortcuts and self.codec.name == "h264"
        self.drained = False  # the codec was flushed: it can go on only after a seek
        self.matcher = FrameMatcher(
            job,
            buffer,
            stream.time_base,
            count_frames=count_frames,
            frame_per_packet=self.has_exact_dts and self.codec.name in ("h264", "hevc"),
        )

    def run(self) -> None:
        """Resolves all planned times."""
        matcher = self.matcher
        sought_earlier = -1  # index of the planned time for which a seek was repeated
        while not matcher.done:
            index = matcher.next_index
            time = self.job.times[index]
            key_pts = self._key_frame_before(time) if self.shortcuts else None
            if index != sought_earlier:
                position = matcher.newest_pts or 0.0
                if self.drained or self._seek_saves_work(key_pts, position):
                    self._seek(time)
            if self._decode_until_resolved(time, drain_early=self._next_is_last_before_seek()):
                continue
            if not matcher.seek_overshot:
                break  # the end of the stream
            self._seek_earlier(key_pts, time)
            sought_earlier = index
        matcher.finish()

    # ------------------------------------------------------------------------------------- seeking

    def _key_frame_before(self, time: float) -> float | None:
        """The time of the last key frame before a planned time; None if the index has none. It may
        be slightly late, in which case a seek to it overshoots."""
        if self.pts_offset is None:
            back = self.max_pts_offset
        else:
            back = self.pts_offset - self.job.tolerance
        entries = self.stream.index_entries
        stamp = round((time + self.job.start - back) / self.stream.time_base)
        number = entries.search_timestamp(stamp, backward=True)
        if number < 0:
            return None
        dts = float(entries[number].timestamp * self.stream.time_base) - self.job.start
        return dts + (self.pts_offset or 0.0)

    def _seek_saves_work(self, key_pts: float | None, position: float) -> bool:
        """Whether seeking to a key frame decodes fewer frames than going on from `position`."""
        if key_pts is None:
            return False
        margin = self.max_pts_offset if self.pts_offset is None else 1 / self.job.fps
        return key_pts > position + margin

    def _next_is_last_before_seek(self) -> bool:
        """Whether no frame after the next planned time is needed before the next seek."""
        if not self.has_exact_dts:
            return False
        times = self.job.times
        index = self.matcher.next_index
        if index + 1 == len(times):
            return True
        return self._seek_saves_work(self._key_frame_before(times[index + 1]), times[index])

    def _seek(self, time: float, *, check_overshoot: bool = True) -> None:
        """Seeks to the last key frame that begins no later than `time`."""
        stamp = round((time + self.job.start + self.job.tolerance) / self.stream.time_base)
        self.container.seek(stamp, stream=self.stream, backward=True)
        self.codec.reorder_depth = self.reorder_depth  # FFmpeg resets it on a seek
        self.matcher.reset_after_seek(check_overshoot=check_overshoot)
        self.drained = False
        self.took_shortcut = True

    def _seek_earlier(self, key_pts: float | None, time: float) -> None:
        """Seeks to the key frame before the one where the last seek overshot the planned time."""
        target = time if key_pts is None else min(key_pts, time)
        self._seek(target - self.max_pts_offset, check_overshoot=False)

    # ------------------------------------------------------------------------------------ decoding

    def _decode_until_resolved(self, time: float, *, drain_early: bool) -> bool:
        """Decodes until the planned `time` is resolved, with `drain_early` no packet more than that
        needs. False at the end of the stream, or where a seek overshot."""
        held_back: list[Any] = []
        try:
            return self._decode_packets(time, drain_early, held_back)
        except av.error.FFmpegError:  # the container is damaged or ends here
            self.matcher.add_damage(None)
            self._decode_rest(held_back)
            return False

    def _decode_packets(self, time: float, drain_early: bool, held_back: list[Any]) -> bool:
        """As `_decode_until_resolved`. Packets of frames after `time` are held back until a frame
        before `time` follows, which may refer to them."""
        index = self.matcher.next_index
        latest = time + self.job.tolerance
        for packet in self.container.demux(self.stream):
            pts = self._seconds(packet.pts)
            dts = self._seconds(packet.dts)
            self._learn_pts_offset(pts, dts)
            if drain_early and dts is not None and dts > latest:
                return self._drain(index)
            if drain_early and pts is not None and pts > latest:
                held_back.append(packet)
                continue
            for waiting in (*held_back, packet):
                self._decode_packet(waiting)
            held_back.clear()
            if self.matcher.seek_overshot:
                return False
            if self.matcher.next_index > index:
                return True
        return False

    def _learn_pts_offset(self, pts: float | None, dts: float | None) -> None:
        if self.pts_offset is None and self.has_exact_dts:
            self.pts_offset = None if pts is None or dts is None else pts - dts

    def _decode_packet(self, packet: Any) -> None:
        pts = self._seconds(packet.pts)
        if pts is not None:
            if self.skips_unreferenced:
                needed = self.matcher.may_be_shown(pts)
                self.codec.skip_frame = "DEFAULT" if needed else "NONREF"
                self.took_shortcut = self.took_shortcut or not needed
            self.matcher.sent_pts.append(pts)
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            self.matcher.add_damage(pts)
            return
        for frame in frames:
            self.matcher.add_frame(frame)

    def _drain(self, index: int) -> bool:
        """Flushes the codec, which has every frame up to the planned time with this index, and
        resolves that time. False where a seek overshot."""
        try:
            self._add_frames_left_in_codec()
        except av.error.InvalidDataError:
            self.matcher.add_damage(None)
        self.drained = True
        if self.matcher.seek_overshot:
            return False
        if self.matcher.next_index == index:
            self.matcher.resolve_next()
        return True

    def _decode_rest(self, held_back: list[Any]) -> None:
        """Decodes what was read before the container broke off."""
        with suppress(av.error.FFmpegError):
            for packet in held_back:
                self._decode_packet(packet)
            self._add_frames_left_in_codec()

    def _add_frames_left_in_codec(self) -> None:
        for frame in self.codec.decode(None):
            self.matcher.add_frame(frame)

    def _seconds(self, stamp: int | None) -> float | None:
        """A time stamp of the stream in s from the first frame."""
        if stamp is None:
            return None
        return float(stamp * self.stream.time_base) - self.job.start
