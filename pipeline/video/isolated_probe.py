"""Headers, each video's in a process of its own first: for an input of which some file has ended a
process already."""

from __future__ import annotations

from collections.abc import Mapping, Set

from pipeline import storage
from pipeline.records import RequestError, VideoInfo
from pipeline.video.decode_job import DecodeJob
from pipeline.video.probe import probe
from pipeline.video.sandbox import return_worker, take_worker

TRIED = "pipeline.video.probe:try_headers"
MAX_WORKERS = 4  # processes, each of which has the decoders loaded
# bytes and s that the headers of one video may take
MEMORY = 2 << 30
SECONDS = 60
ENDED = frozenset(("decode_crashed", "decode_timeout"))  # it did not come back


def probe_all(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
    """As `pipeline.intake.requests.probe_all`; a video whose headers end the process that reads them
    is an error."""
    results = storage.map_concurrently(_probe, uris, threads=MAX_WORKERS, min_items=2)
    return dict(zip(uris, results, strict=True))


def _probe(uri: str) -> VideoInfo | RequestError:
    worker = take_worker()
    # as if it were remote: the worker then has storage loaded, once for all its attempts
    job = DecodeJob(
        uri,
        remote=True,
        times=(),
        start=0.0,
        fps=1.0,
        height=0,
        width=0,
        frame_bytes=0,
        size_bytes=0,
    )
    outcome = worker.run(TRIED, job, MEMORY, SECONDS, float(SECONDS))
    return_worker(worker)
    if outcome.error is not None and outcome.error[0] in ENDED:
        code, why = outcome.error
        return RequestError(
            code, f"{storage.display_uri(uri)}: nothing can read its headers: {why}"
        )
    try:
        return probe(uri)
    except RequestError as error:
        return error
