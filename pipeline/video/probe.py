"""What a video's headers say, from as few bytes as its container allows: nothing is decoded but the
first frame, which alone tells how the picture is turned."""

from __future__ import annotations

import math
import re
from typing import Any

import av

from pipeline import storage
from pipeline.records import RequestError, VideoInfo
from pipeline.video.containers import (
    BLOCK,
    HEAD,
    Readable,
    hidden_frames,
    mp4_ends_early,
    open_container,
    quarter_turns,
    sniff,
    video_stream,
)
from pipeline.video.decode_job import DecodeJob, FrameBuffer

MAX_FRAME_PIXELS = (
    1 << 26
)  # 8192 × 8192; a header that claims more is refused before memory is taken
_ROUNDING = 0.002  # s; Matroska rounds what it writes down to a millisecond
_TURNED = frozenset(("mov", "matroska"))  # demuxers that carry a display matrix


def probe(uri: str) -> VideoInfo:
    """The headers of the video at `uri` (a local path or any URL that storage reads).

    Raises: RequestError: `not_found`, `access_denied`, `storage_error` (storage), `empty_file`,
        `not_a_video`,
            `no_video_stream`, `truncated_file`, `too_large`, `zero_frames`.
    """
    file = storage.info(uri)
    name = storage.display_uri(uri)
    if file.size == 0:
        raise RequestError("empty_file", f"{name} is empty: it has 0 bytes")
    with storage.open_read(uri, BLOCK) as reader:
        if (known := sniff(reader.read(HEAD))) is None:
            raise RequestError(
                "not_a_video",
                f"{name} does not begin like a video of any kind that can be read here",
            )
        demuxer, container = known
        reader.seek(0)
        source = storage.local_path(uri) or reader
        try:
            with open_container(source, demuxer) as opened:
                return _read(opened, source, known, file, name=name)
        except (av.error.FFmpegError, ValueError) as error:
            raise _broken(reader, demuxer, container, file.size, name=name) from error


def try_headers(job: DecodeJob, buffer: FrameBuffer) -> None:
    """As a decoder of no frame, in a process of its own: only whether it comes back is of
    interest."""
    probe(job.source)


def _broken(reader: Readable, demuxer: str, container: str, size: int, name: str) -> RequestError:
    """Why a file that begins like a video could not be opened."""
    if demuxer == "mov" and mp4_ends_early(reader, size):
        return RequestError(
            "truncated_file", f"{name} ends early, after {size} bytes, and its index is missing"
        )
    return RequestError(
        "not_a_video", f"{name} begins like {container} but holds no video that can be read"
    )


def _read(
    opened: Any, source: str | Readable, known: tuple[str, str], file: storage.FileInfo, name: str
) -> VideoInfo:
    (demuxer, container), stream = known, video_stream(opened)
    if stream is None:
        raise RequestError(
            "no_video_stream", f"{name} holds no video stream, only {_other_streams(opened)}"
        )
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
    rotation = _rotation(opened, stream) if demuxer in _TURNED else 0
    frames, duration, fps, exact = _length(opened, stream, demuxer)
    if not frames:
        frames, duration, fps = _count_packets(source, demuxer)
    if frames < 1:
        raise RequestError(
            "zero_frames",
            f"{name} has a video stream of {stream.codec_context.name} without a frame",
        )
    if rotation % 180:
        height, width = width, height
    return VideoInfo(
        uri=file.uri,
        size_bytes=file.size,
        version=file.version,
        container=container,
        codec=stream.codec_context.codec.canonical_name,
        duration=duration,
        start=_start(stream),
        frames=frames,
        exact=exact,
        fps=fps,
        height=height,
        width=width,
        rotation=rotation,
    )


def _other_streams(opened: Any) -> str:
    kinds = sorted(
        {"a picture" if stream.type == "video" else stream.type for stream in opened.streams}
    )
    return " and ".join(kinds) or "headers"


def _length(opened: Any, stream: Any, demuxer: str) -> tuple[int, float, float, bool]:
    """(frames, seconds, frames per second, whether the index counts them); else frames is an upper
    bound, or 0 where the headers give no duration."""
    seconds = _seconds(opened, stream)
    indexed = len(stream.index_entries)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if demuxer == "mov" and stream.frames > 0 and indexed:
        shown = indexed - hidden_frames(stream)
        exact = True
    else:
        shown = stream.frames
        exact = demuxer == "avi" and 0 < stream.frames <= indexed
    if shown > 0:
        seconds = seconds or shown / (rate or 1.0)
        return shown, seconds, shown / seconds, exact
    if seconds and rate:
        return math.ceil((seconds - _ROUNDING) * rate), seconds, rate, False
    return 0, 0.0, 1.0, False


def _seconds(opened: Any, stream: Any) -> float:
    """Duration of the video stream in s, of the whole container where only that is known, else
    0."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    seconds = max(0, opened.duration or 0) / av.time_base
    if opened.format.name.startswith(
        "matroska"
    ):  # writes down when a stream ends, not how long it lasts
        if tagged := re.fullmatch(
            r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", "")
        ):
            hours, minutes, seconds = map(float, tagged.groups())
            seconds += hours * 3600 + minutes * 60
        seconds = max(0.0, seconds - _start(stream))
    return seconds


def _start(stream: Any) -> float:
    """The first frame's presentation time in s."""
    return float(stream.start_time * stream.time_base) if stream.start_time is not None else 0.0


def _count_packets(source: str | Readable, demuxer: str) -> tuple[int, float, float]:
    """(frames, seconds, frames per second) of a stream whose headers give no duration, as live
    recordings are: by reading it through."""
    if not isinstance(source, str):
        source.seek(0)
    with open_container(source, demuxer) as opened:
        stream = video_stream(opened)
        stamps = [
            packet.pts for packet in opened.demux(stream) if packet.size and packet.pts is not None
        ]
        if stream is None or not stamps:
            return 0, 0.0, 1.0
        step = (max(stamps) - min(stamps)) / max(1, len(stamps) - 1)
        seconds = float((max(stamps) - min(stamps) + step) * stream.time_base) or 1.0
        return len(stamps), seconds, len(stamps) / seconds


def _rotation(opened: Any, stream: Any) -> int:
    """How the display matrix turns the picture; a first frame that does not decode tells nothing,
    which is 0."""
    stream.codec_context.thread_type = "NONE"
    try:
        frame = next(iter(opened.decode(stream)), None)
    except av.error.FFmpegError:
        return 0  # damage is the frames stage's to report, with what was lost
    return quarter_turns(frame.rotation) if frame is not None else 0
