"""Reads a video's headers, from as few bytes as its container allows.

Only the first frame is decoded: it carries the rotation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import av

from pipeline import storage
from pipeline.records import RequestError, VideoInfo
from pipeline.video.containers import (
    BLOCK,
    HEAD,
    Container,
    Readable,
    hidden_frames,
    mp4_is_truncated,
    open_container,
    quarter_turns,
    sniff,
    video_stream,
)
from pipeline.video.decode_job import DecodeJob, FrameBuffer

MAX_FRAME_PIXELS = 1 << 26  # 8192 × 8192; checked before memory is allocated
_ROUNDING = 0.002  # s; Matroska rounds durations to a millisecond
_HAS_DISPLAY_MATRIX = frozenset(("mov", "matroska"))  # demuxers


class _Length(NamedTuple):
    """Length of a video stream."""

    frames: int  # an upper bound unless `exact`; 0 where the headers give no duration
    seconds: float
    fps: float  # average
    exact: bool = False  # the container's index counts the frames


_UNKNOWN_LENGTH = _Length(0, 0.0, 1.0)


def probe(uri: str) -> VideoInfo:
    """Reads the headers of the video at a local path or a URL that storage reads.

    Raises:
        RequestError: `not_found`, `access_denied`, `storage_error` (from storage), `empty_file`,
            `not_a_video`, `no_video_stream`, `truncated_file`, `too_large`, `zero_frames`.
    """
    file = storage.info(uri)
    name = storage.display_uri(uri)
    if file.size == 0:
        raise RequestError("empty_file", f"{name} is empty: it has 0 bytes")
    with storage.open_read(uri, BLOCK) as reader:
        container = sniff(reader.read(HEAD))
        if container is None:
            raise RequestError(
                "not_a_video", f"{name} does not begin like a video of a supported container"
            )
        reader.seek(0)
        source = storage.local_path(uri) or reader
        try:
            with open_container(source, container.demuxer) as opened:
                return _read_headers(opened, source, container, file, name=name)
        except (av.error.FFmpegError, ValueError, ArithmeticError) as error:
            raise _unreadable(reader, container, file.size, name) from error


@contextmanager
def video_errors(work: str) -> Iterator[None]:
    """Turns whatever the work on one video or request raises into its error: `invalid_request`
    that names the exception, unless it is a RequestError already.

    Args:
        work: what is done, for the message.
    """
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # MemoryError and exceptions of libraries included
        name = type(error).__name__
        raise RequestError(
            "invalid_request", f"{work} raised {name}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or "without a message"


def check_headers(job: DecodeJob, _buffer: FrameBuffer) -> None:
    """Probes `job.source`. Called like a decoder, in a process of its own, to find out whether the
    headers crash it."""
    probe(job.source)


def _unreadable(reader: Readable, container: Container, size: int, name: str) -> RequestError:
    """The error of a file that begins like a video but cannot be opened."""
    if container.demuxer == "mov" and mp4_is_truncated(reader, size):
        return RequestError(
            "truncated_file", f"{name} ends early, after {size} bytes, and its index is missing"
        )
    return RequestError(
        "not_a_video", f"{name} begins like {container.name} but holds no readable video"
    )


def _read_headers(
    opened: Any, source: str | Readable, container: Container, file: storage.FileInfo, *, name: str
) -> VideoInfo:
    stream = video_stream(opened)
    if stream is None:
        raise RequestError(
            "no_video_stream", f"{name} holds no video stream, only {_other_streams(opened)}"
        )
    height, width = _frame_size(stream, name)
    demuxer = container.demuxer
    rotation = _rotation(opened, stream) if demuxer in _HAS_DISPLAY_MATRIX else 0
    length = _length(opened, stream, demuxer)
    if not _is_credible(length, file.size):
        length = _length_by_packets(source, demuxer)
    if not length.frames:
        codec = stream.codec_context.name
        raise RequestError("zero_frames", f"{name} has a {codec} video stream without a frame")
    if rotation % 180:
        height, width = width, height
    return VideoInfo(
        uri=file.uri,
        size_bytes=file.size,
        version=file.version,
        container=container.name,
        codec=stream.codec_context.codec.canonical_name,
        duration=length.seconds,
        start=_start(stream),
        frames=length.frames,
        exact=length.exact,
        fps=length.fps,
        height=height,
        width=width,
        rotation=rotation,
    )


def _other_streams(opened: Any) -> str:
    kinds = sorted(
        {"a picture" if stream.type == "video" else stream.type for stream in opened.streams}
    )
    return " and ".join(kinds) or "headers"


def _frame_size(stream: Any, name: str) -> tuple[int, int]:
    """Height and width of the stored frames, before rotation, in pixels."""
    height = stream.codec_context.height
    width = stream.codec_context.width
    if height < 1 or width < 1:
        raise RequestError(
            "not_a_video", f"{name} has a video stream without a picture size: its start is damaged"
        )
    if height * width > MAX_FRAME_PIXELS:
        raise RequestError(
            "too_large",
            f"{name} claims frames of {width}×{height}; at most 2^26 pixels are decoded",
        )
    return height, width


def _length(opened: Any, stream: Any, demuxer: str) -> _Length:
    """The length that the headers give."""
    seconds = _seconds(opened, stream)
    indexed = len(stream.index_entries)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if demuxer == "mov" and stream.frames > 0 and indexed:
        frames = indexed - hidden_frames(stream)
        exact = True
    else:
        frames = stream.frames
        exact = demuxer == "avi" and 0 < stream.frames <= indexed
    if frames > 0:
        seconds = seconds or frames / (rate or 1.0)
        return _Length(frames, seconds, frames / seconds, exact)
    if seconds and rate:
        return _Length(math.ceil((seconds - _ROUNDING) * rate), seconds, rate)
    return _UNKNOWN_LENGTH


def _is_credible(length: _Length, size: int) -> bool:
    """Whether a file of `size` bytes can have the length that its headers give: a frame takes a
    byte at least."""
    return 0 < length.frames <= size


def _seconds(opened: Any, stream: Any) -> float:
    """Duration of the video stream, else of the whole container, else 0."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    seconds = max(0, opened.duration or 0) / av.time_base
    if opened.format.name.startswith("matroska"):
        # Matroska stores the time at which a stream ends, not its duration
        tag = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
        if tag:
            hours, minutes, seconds = map(float, tag.groups())
            seconds += hours * 3600 + minutes * 60
        seconds = max(0.0, seconds - _start(stream))
    return seconds


def _start(stream: Any) -> float:
    """The first frame's presentation time in s."""
    return float(stream.start_time * stream.time_base) if stream.start_time is not None else 0.0


def _length_by_packets(source: str | Readable, demuxer: str) -> _Length:
    """The length of a stream whose headers give no duration, such as a live recording's: reads all
    of the file and counts packets."""
    if not isinstance(source, str):
        source.seek(0)
    with open_container(source, demuxer) as opened:
        stream = video_stream(opened)
        stamps = [
            packet.pts for packet in opened.demux(stream) if packet.size and packet.pts is not None
        ]
        if stream is None or not stamps:
            return _UNKNOWN_LENGTH
        span = max(stamps) - min(stamps)
        frame = span / max(1, len(stamps) - 1)
        seconds = float((span + frame) * stream.time_base) or 1.0
        return _Length(len(stamps), seconds, len(stamps) / seconds)


def _rotation(opened: Any, stream: Any) -> int:
    """Degrees by which the display matrix rotates the frames; 0 if the first one does not decode,
    which the frames stage reports."""
    stream.codec_context.thread_type = "NONE"
    try:
        frame = next(iter(opened.decode(stream)), None)
    except av.error.FFmpegError:
        return 0
    return quarter_turns(frame.rotation) if frame is not None else 0
