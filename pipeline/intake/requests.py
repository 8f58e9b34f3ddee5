"""From an input to planned requests, on one machine and from headers alone: which have no row yet,
what their videos are. No frame is decoded, and Ray is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from pipeline import storage
from pipeline.config import Job, draft_of
from pipeline.intake.identity import request_id
from pipeline.intake.manifest import Manifest, open_manifest
from pipeline.records import (
    FailedRequest,
    InputRow,
    PendingRequest,
    PlannedRequest,
    ProbedRequest,
    RequestError,
    UsageError,
    VideoInfo,
)
from pipeline.video.frame_plan import plan_frames
from pipeline.video.probe import probe
from pipeline.video.windows import Window, split_into_windows

if TYPE_CHECKING:  # the records here are a driver's too, which does without PyTorch
    from std_core.model.checkpoint import Checkpoint

# requests that are looked at together
FIRST_BATCH = 64
MAX_BATCH = 1024
THREADS = 16  # videos whose headers are read at once

ProbeAll = Callable[
    [Set[str]], Mapping[str, VideoInfo | RequestError]
]  # what is known of each video
_Version = tuple[int | None, str | None]
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class RequestStream:
    """The input's requests, one pass, in its order.

    Attributes: ids: fingerprints of all that were seen so far, those with a row included; a
        repeated id is one request. probed: reads headers.
    """

    items: Iterable[InputRow]
    job: Job
    revision: str
    ids: set[bytes]
    probe_all: ProbeAll = field(default_factory=lambda: probe_all)

    def pending(self, done: Set[bytes]) -> Iterator[PendingRequest]:
        """Those that are not in `done`, which must not change meanwhile."""
        for batch in _batches(self.items, 1024):
            uris = {item.video_uri for item in batch}
            versions = dict(zip(uris, _map_concurrently(_version, uris), strict=True))
            for pending in self._pending(batch, versions):
                fingerprint = bytes.fromhex(pending.request_id)
                if fingerprint not in self.ids:
                    self.ids.add(fingerprint)
                    if fingerprint not in done:
                        yield pending

    def _pending(
        self, batch: Sequence[InputRow], versions: Mapping[str, _Version]
    ) -> Iterator[PendingRequest]:
        """The requests of some items: one each, or one per window."""
        seconds = self.job.window_seconds
        if seconds is None:
            for item in batch:
                yield PendingRequest(self._id(item, *versions[item.video_uri]), item)
            return
        infos = self.probe_all({item.video_uri for item in batch if item.video_uri})
        for item in batch:
            info = infos.get(item.video_uri)
            # a video that cannot be read fails as its first window, whose row takes the failed
            # one's place later
            found: Sequence[Window | None] = [None]
            if isinstance(info, VideoInfo):
                found = split_into_windows(info, self.job.frames, seconds, self.job.window_overlap)
            for window in found:
                start = (self.job.frames.video_start or 0.0) if window is None else window[0]
                named = {
                    "start": round(start, 6),
                    "seconds": seconds,
                    "overlap": self.job.window_overlap,
                }
                yield PendingRequest(
                    self._id(item, *versions[item.video_uri], named), item, window, info
                )

    @cached_property
    def sparse(self) -> dict[str, object] | None:
        """Of `--mode sparse` the draft, which then makes the text; γ is no part of what it sees."""
        draft = draft_of(self.job) if self.job.mode == "sparse" else None
        return None if draft is None else {k: v for k, v in asdict(draft).items() if k != "gamma"}

    def _id(
        self,
        item: InputRow,
        size: int | None,
        version: str | None,
        window: Mapping[str, object] | None = None,
    ) -> str:
        return request_id(
            video_uri=item.video_uri,
            size=size,
            version=version,
            prompt=item.prompt,
            model_revision=self.revision,
            frames=self.job.frames,
            sampling=self.job.sampling,
            dtype=self.job.dtype,
            given_id=item.given_id,
            occurrence=item.occurrence,
            sparse=self.sparse,
            window=window,
        )


def resolve_max_model_len(job: Job, checkpoint: Checkpoint) -> int:
    """Tokens that a request may have in all. Raises UsageError where more is asked for than the
    model has."""
    if job.max_model_len and job.max_model_len > checkpoint.max_model_len:
        raise UsageError(
            f"--max-model-len is {job.max_model_len}: the model's window is {checkpoint.max_model_len}"
        )
    return job.max_model_len or checkpoint.max_model_len


def open_job_manifest(job: Job, prompts: Sequence[str]) -> Manifest:
    """The input, looked at. Raises UsageError."""
    return open_manifest(job.input, prompts, job.video_column or None, job.question_column or None)


def probe_all(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
    """What the headers of videos say, or why they cannot be read."""
    return dict(zip(uris, _map_concurrently(_probe, uris), strict=True))


def _map_concurrently(function: Callable[[str], R], uris: Set[str]) -> list[R]:
    return storage.map_concurrently(function, uris, threads=THREADS, min_items=2)


def plan_in_batches(
    pending: Iterable[PendingRequest],
    job: Job,
    checkpoint: Checkpoint,
    probe_all: ProbeAll = probe_all,
) -> Iterator[list[ProbedRequest]]:
    """All requests, planned or failed, in batches: small ones at first, so that engines begin
    early."""
    rest = iter(pending)
    size = FIRST_BATCH
    while batch := list(islice(rest, size)):
        size = min(MAX_BATCH, 2 * size)
        yield list(plan_requests(batch, job, checkpoint, probe_all))


def plan_requests(
    pool: Sequence[PendingRequest],
    job: Job,
    checkpoint: Checkpoint,
    probe_all: ProbeAll = probe_all,
) -> Iterator[ProbedRequest]:
    """Reads the headers of the videos, each once, and plans every request."""
    infos = probe_all(
        {p.input_row.video_uri for p in pool if p.input_row.video_uri and p.info is None}
    )
    for pending in pool:
        info = pending.info or infos.get(pending.input_row.video_uri)
        try:
            yield _plan(pending, info, job, checkpoint)
        except RequestError as error:
            yield FailedRequest(pending, error, info if isinstance(info, VideoInfo) else None)


def _plan(
    pending: PendingRequest, info: VideoInfo | RequestError | None, job: Job, checkpoint: Checkpoint
) -> PlannedRequest:
    if info is None or not pending.input_row.prompt:
        missing = "video" if info is None else "question"
        raise RequestError("invalid_request", f"the input names no {missing} in this row")
    if isinstance(info, RequestError):
        raise info
    frames = plan_frames(info, job.frames, checkpoint.geometry, pending.window)
    text = checkpoint.count_prompt_tokens(
        pending.input_row.prompt, len(frames.times), frames.fps, frames.times
    )
    window = resolve_max_model_len(job, checkpoint)
    if text + frames.tokens >= window:
        raise RequestError(
            "context_too_long",
            f"{frames.tokens} visual tokens of {len(frames.times)} frames and {text} of the prompt leave no room in "
            f"{window}: lower fps, max_frames, max_pixels or total_pixels",
        )
    return PlannedRequest(
        pending.request_id,
        input_row=pending.input_row,
        info=info,
        frame_plan=frames,
        context=text + frames.tokens,
        window=pending.window,
    )


def _probe(uri: str) -> VideoInfo | RequestError:
    try:
        return probe(uri)
    except RequestError as error:
        return error


def _version(uri: str) -> tuple[int | None, str | None]:
    """Size and version of a video; Nones where it cannot be looked at, for which the probe will
    find the reason."""
    try:
        found = storage.info(uri)
    except RequestError:
        return None, None
    return found.size, found.version


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch
