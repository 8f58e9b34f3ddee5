"""Copies a remote video to a local file, inside a decoding process."""

from __future__ import annotations

import importlib

from pipeline.video.containers import BLOCK
from pipeline.video.decode_job import DecodeJob, FrameBuffer


def download(job: DecodeJob, _sink: FrameBuffer) -> None:
    """Copies a remote file to `job.target`, and no more of it than its size when it was probed."""
    storage = importlib.import_module("pipeline.storage")
    left = job.size_bytes
    with storage.open_read(job.source, 16 * BLOCK) as reader, open(job.target, "wb") as copy:
        while left > 0 and (piece := reader.read(min(left, 16 * BLOCK))):
            left -= copy.write(piece)
