"""Headers, each video's in a process of its own first: for an input of which some file has ended a
process already."""

from __future__ import annotations

from collections.abc import Mapping, Set

from pipeline import storage
from pipeline.records import RequestError, VideoInfo
from pipeline.video.decode_job import DecodeJob
from pipeline.video.probe import probe
from pipeline.video.sandbox import give_worker, take_worker

TRIED = "pipeline.video.probe:try_headers"
MOST = 4  # processes, each of which has the decoders loaded
# bytes and s that the headers of one video may take
MEMORY = 2 << 30
SECONDS = 60
ENDED = frozenset(("decode_crashed", "decode_timeout"))  # it did not come back


def probed(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
    """As `pipeline.intake.requests.probed`; a video whose headers end the process that reads them
    is an error."""
    return storage.map_concurrently(_probe, uris, MOST)


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
    give_worker(worker)
    if outcome.error is not None and outcome.error[0] in ENDED:
        code, why = outcome.error
        return RequestError(code, f"{storage.shown(uri)}: nothing can read its headers: {why}")
    try:
        return probe(uri)
    except RequestError as error:
        return error
