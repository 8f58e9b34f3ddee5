"""Probes videos, each in a decoding process first: for inputs in which some file has crashed the
process that reads headers."""

from __future__ import annotations

from collections.abc import Mapping, Set

from pipeline import storage
from pipeline.records import RequestError, VideoInfo
from pipeline.video.decode_job import DecodeJob
from pipeline.video.probe import probe, video_errors
from pipeline.video.sandbox import AttemptLimits, return_worker, take_worker

HEADER_CHECK = "pipeline.video.probe:check_headers"
MAX_WORKERS = 4  # processes; each has loaded the decoders
LIMITS = AttemptLimits(memory_bytes=2 << 30, cpu_seconds=60, wall_seconds=60.0)  # per video
_DID_NOT_RETURN = frozenset(("decode_crashed", "decode_timeout"))


def probe_all(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
    """Like `pipeline.intake.requests.probe_all`; headers that crash or hang the process are an
    error of that video."""
    results = storage.map_concurrently(_probe, uris, threads=MAX_WORKERS, min_items=2)
    return dict(zip(uris, results, strict=True))


def _probe(uri: str) -> VideoInfo | RequestError:
    if (crash := _check_in_process(uri)) is not None:
        return crash
    try:
        with video_errors(f"reading the headers of {storage.display_uri(uri)}"):
            return probe(uri)
    except RequestError as error:
        return error


def _check_in_process(uri: str) -> RequestError | None:
    """An error if reading the headers crashes or hangs a process."""
    job = DecodeJob(
        uri,
        remote=True,  # so that the worker imports storage once, before it forks
        times=(),
        start=0.0,
        fps=1.0,
        height=0,
        width=0,
        frame_bytes=0,
        size_bytes=0,
    )
    worker = take_worker()
    error = worker.run(HEADER_CHECK, job, LIMITS).error
    return_worker(worker)
    if error is None or error.code not in _DID_NOT_RETURN:
        return None
    return RequestError(
        error.code, f"{storage.display_uri(uri)}: its headers cannot be read: {error.reason}"
    )
