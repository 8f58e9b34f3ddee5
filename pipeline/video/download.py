"""Copies a remote video to a local file. Runs inside a decoding process, in place of a decoder."""

from __future__ import annotations

import importlib

from pipeline.video.containers import BLOCK
from pipeline.video.decode_job import DecodeJob, FrameBuffer

CHUNK = 16 * BLOCK  # bytes per read


def download(job: DecodeJob, _buffer: FrameBuffer) -> None:
    """Copies `job.source` to `job.download_path`: at most as many bytes as the file had when it
    was probed."""
    storage = importlib.import_module("pipeline.storage")  # slow to import
    remaining = job.size_bytes
    with storage.open_read(job.source, CHUNK) as reader, open(job.download_path, "wb") as copy:
        while remaining > 0 and (chunk := reader.read(min(remaining, CHUNK))):
            remaining -= copy.write(chunk)
