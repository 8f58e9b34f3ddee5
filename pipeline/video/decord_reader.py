"""The decord decoder. Runs inside a decoding process.

decord seeks by counting the frames that leave the codec. Where the codec drops frames after a seek,
decord returns other frames than asked for, without an error. Seen with decord2 3.4: H.264 and HEVC
with open GOPs or intra-refresh, MPEG-4 with B frames, containers without an index (TS, PS, ASF),
edit lists. Such files are refused here and decoded by PyAV, which goes by time stamps and is as
fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.video.containers import INDEXED, hidden_frames, open_container, video_stream
from pipeline.video.decode_job import DecodeError, DecodeJob, FrameBuffer, demuxer_of, resize

BATCH_BYTES = 64 << 20  # full-size frames per `get_batch` call
_OPEN_GOP_CODECS = frozenset(("h264", "hevc"))  # decoding may not start cleanly at a key frame


def decode(job: DecodeJob, buffer: FrameBuffer) -> None:
    """Decodes the planned frames of an intact local file; one damaged or missing frame fails the
    attempt.

    Raises:
        DecodeError: `unsuited` for a file that decord misreads, `decode_error`, `not_a_video`.
    """
    import decord  # not at the top: a decord that does not load fails this attempt only

    _check_suited(job.source)
    try:
        reader = decord.VideoReader(job.source, num_threads=1, fault_tol=1e-9)
        _read_frames(reader, job, buffer)
    except (decord.DECORDError, decord.DECORDLimitReachedError) as error:
        raise DecodeError("decode_error", "it met frames that it could not decode") from error


def _read_frames(reader: Any, job: DecodeJob, buffer: FrameBuffer) -> None:
    stamps = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)
    stamps = stamps - stamps[0, 0]  # (frames, 2): start and end, s from the first frame
    starts = stamps[:, 0]
    end = stamps[-1, 1]
    if job.times[-1] > end + 1 / job.fps:
        raise DecodeError("decode_error", "its last frames are missing")
    # of each planned time: the last frame that starts before it
    latest = np.array(job.times) + job.tolerance
    wanted = np.maximum(np.searchsorted(starts, latest, side="right") - 1, 0)
    numbers, counts = np.unique(wanted, return_counts=True)
    batch = max(1, BATCH_BYTES // job.frame_bytes)
    for first in range(0, len(numbers), batch):
        in_batch = slice(first, first + batch)
        images = reader.get_batch(numbers[in_batch]).asnumpy()
        for number, count, image in zip(numbers[in_batch], counts[in_batch], images, strict=True):
            buffer.add(float(starts[number]), resize(image, job.height, job.width, 0))
            for _ in range(count - 1):
                buffer.repeat_last()


def _check_suited(path: str) -> None:
    """Raises DecodeError `unsuited` for files whose frames decord miscounts without an error."""
    demuxer = demuxer_of(path)
    if demuxer not in INDEXED:
        raise DecodeError("unsuited", "it miscounts frames without an index")
    with open_container(path, demuxer) as container:
        stream = video_stream(container)
        if stream is None:
            return
        codec = stream.codec_context
        if codec.reorder_depth or codec.name in _OPEN_GOP_CODECS:
            raise DecodeError("unsuited", "it may miscount frames after a seek")
        if demuxer == "mov" and hidden_frames(stream):
            raise DecodeError("unsuited", "it returns frames that the edit list hides")
