"""The decoders, as they run inside a decoding process (`pipeline.video.sandbox`): frames of planned
times, resized as they come.

A decoder is a function of a `DecodeJob` that tells a `FrameBuffer`, planned time by planned time, which frame is
shown then: the last one that begins no later; where that frame is missing or damaged, the time is
lost. At most one group of frames is held at full size. Storage is imported for remote files only.

decord is not given every file. After a seek it counts the frames that come out of the codec, and
where some do not, it returns other frames than asked for, without an error. Seen with decord2 3.4:
H.264 and HEVC with open GOPs or intra-refresh, MPEG-4 with B frames, containers without an index
(TS, PS, ASF), edit lists. Those are PyAV's, which goes by time stamps and is as fast."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.video.containers import (
    BLOCK,
    hidden_frames,
    open_container,
    video_stream,
)
from pipeline.video.decode_job import DecodeError, DecodeJob, FrameBuffer, demuxer_of, resize
from pipeline.video.pyav_reader import INDEXED

GROUP_BYTES = 64 << 20  # full-size frames that decord hands over at once
SMALL = 4 * BLOCK  # bytes; a remote file as small as this is downloaded, whatever is needed of it
_OPEN = frozenset(("h264", "hevc"))  # codecs in which a key frame need not be a clean start


def decode(job: DecodeJob, buffer: FrameBuffer) -> None:
    """Frames through decord, for whole files that it reads rightly: one frame that it would have to
    make up, or that it does not find, fails the attempt."""
    import decord  # here, so that a decord that does not load costs an attempt, not the process

    _fit_for_decord(job.source)
    try:
        reader = decord.VideoReader(job.source, num_threads=1, fault_tol=1e-9)
        _whole(reader, job, buffer)
    except (decord.DECORDError, decord.DECORDLimitReachedError) as error:
        raise DecodeError("decode_error", "it met frames that it could not decode") from error


def _whole(reader: Any, job: DecodeJob, buffer: FrameBuffer) -> None:
    begins, ends = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64).T
    begins, ends = begins - begins[0], ends - begins[0]
    if job.times[-1] > ends[-1] + 1 / job.fps:
        raise DecodeError("decode_error", "its last frames are missing")
    found = np.maximum(
        np.searchsorted(begins, np.array(job.times) + job.slack, side="right") - 1, 0
    )
    numbers, counts = np.unique(found, return_counts=True)
    group = max(1, GROUP_BYTES // job.frame_bytes)
    for at in range(0, len(numbers), group):
        images = reader.get_batch(numbers[at : at + group]).asnumpy()
        for number, count, image in zip(numbers[at:], counts[at:], images, strict=False):
            buffer.add(float(begins[number]), resize(image, job.height, job.width, 0))
            for _ in range(count - 1):
                buffer.repeat_last()


def _fit_for_decord(path: str) -> None:
    """Refuses what decord would read without complaint, but with other frames than are shown at
    those times."""
    demuxer = demuxer_of(path)
    if demuxer not in INDEXED:
        raise DecodeError("unsuited", "it loses count without an index")
    with open_container(path, demuxer) as container:
        stream = video_stream(container)
        if stream is not None and (
            stream.codec_context.reorder_depth or stream.codec_context.name in _OPEN
        ):
            raise DecodeError("unsuited", "it may lose count after a seek")
        if stream is not None and demuxer == "mov" and hidden_frames(stream):
            raise DecodeError("unsuited", "it shows what an edit list hides")
