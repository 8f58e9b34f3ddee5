"""From input rows to planned requests, from video headers alone.

`RequestStream` gives each row its request id and drops those that have an output row;
`plan_in_batches` reads the headers of the rest and plans their frames. No frame is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

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
from pipeline.video.probe import probe, video_errors
from pipeline.video.windows import Window, split_into_windows
from std_core.model.checkpoint import Checkpoint

FIRST_BATCH = 64  # requests that are planned together; small, so that engines start early
MAX_BATCH = 1024
ROW_BATCH = 1024  # input rows whose videos are looked up together
THREADS = 16  # videos that are read at once

ProbeAll = Callable[[Set[str]], Mapping[str, VideoInfo | RequestError]]
R = TypeVar("R")
T = TypeVar("T")


class _FileVersion(NamedTuple):
    """Size in bytes and version of a video file; Nones if it cannot be read."""

    size: int | None
    version: str | None


def open_job_manifest(job: Job, prompts: Sequence[str]) -> Manifest:
    """Opens the job's input. Raises UsageError."""
    return open_manifest(job.input, prompts, job.video_column or None, job.question_column or None)


def resolve_max_model_len(job: Job, checkpoint: Checkpoint) -> int:
    """The largest number of tokens of a request, prompt and answer. Raises UsageError if the job
    sets more than the model has."""
    if job.max_model_len and job.max_model_len > checkpoint.max_model_len:
        raise UsageError(
            f"--max-model-len is {job.max_model_len}: "
            f"the model takes at most {checkpoint.max_model_len}"
        )
    return job.max_model_len or checkpoint.max_model_len


def probe_all(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
    """Probes videos, each of which gives its headers or an error."""
    return dict(zip(uris, _map_concurrently(_probe_or_error, uris), strict=True))


def _probe_or_error(uri: str) -> VideoInfo | RequestError:
    try:
        with video_errors(f"reading the headers of {storage.display_uri(uri)}"):
            return probe(uri)
    except RequestError as error:
        return error


def _map_concurrently(function: Callable[[str], R], uris: Set[str]) -> list[R]:
    return storage.map_concurrently(function, uris, threads=THREADS, min_items=2)


# ---------------------------------------------------------------------------- which requests to run


@dataclass
class RequestStream:
    """The requests of an input, read once and in its order. Equal request ids are one request.

    Attributes:
        rows: of the input.
        revision: of the model's checkpoint.
        ids: binary request ids so far, including those of requests with an output row.
        probe_all: reads headers; needed here only where windows are cut.
    """

    rows: Iterable[InputRow]
    job: Job
    revision: str
    ids: set[bytes]
    probe_all: ProbeAll = field(default_factory=lambda: probe_all)

    def pending(self, done: Set[bytes]) -> Iterator[PendingRequest]:
        """The requests whose ids are not in `done`, which must not change meanwhile."""
        for rows in _batches(self.rows, ROW_BATCH):
            for request in self._requests(rows):
                binary_id = bytes.fromhex(request.request_id)
                if binary_id not in self.ids:
                    self.ids.add(binary_id)
                    if binary_id not in done:
                        yield request

    def _requests(self, rows: Sequence[InputRow]) -> Iterator[PendingRequest]:
        """The requests of some rows: one per row, or one per window."""
        uris = {row.video_uri for row in rows}
        versions = dict(zip(uris, _map_concurrently(_file_version, uris), strict=True))
        if self.job.window_seconds is None:
            for row in rows:
                yield PendingRequest(self._request_id(row, versions[row.video_uri]), row)
            return
        infos = self.probe_all({uri for uri in uris if uri})
        for row in rows:
            info = infos.get(row.video_uri)
            windows, info = self._windows(info)
            for window in windows:
                id_ = self._request_id(
                    row, versions[row.video_uri], window=self._window_identity(window)
                )
                yield PendingRequest(id_, row, window, info)

    def _windows(
        self, info: VideoInfo | RequestError | None
    ) -> tuple[Iterable[Window | None], VideoInfo | RequestError | None]:
        """The windows of a video, and its headers or the error of cutting it.

        A video that cannot be read or cut has the one window None: its error row has the id of the
        first window, so that it is replaced once the video can be."""
        assert self.job.window_seconds is not None
        if not isinstance(info, VideoInfo):
            return [None], info
        try:
            with video_errors("cutting the video into windows"):
                windows = split_into_windows(
                    info, self.job.frames, self.job.window_seconds, self.job.window_overlap
                )
        except RequestError as error:
            return [None], error
        return windows, info

    def _window_identity(self, window: Window | None) -> dict[str, object]:
        start = (self.job.frames.video_start or 0.0) if window is None else window[0]
        return {
            "start": round(start, 6),
            "seconds": self.job.window_seconds,
            "overlap": self.job.window_overlap,
        }

    @cached_property
    def _sparse_identity(self) -> dict[str, object] | None:
        """In `--mode sparse` the draft alone makes the text, so its settings are part of the id,
        except γ."""
        draft = draft_of(self.job) if self.job.mode == "sparse" else None
        if draft is None:
            return None
        return {name: value for name, value in asdict(draft).items() if name != "gamma"}

    def _request_id(
        self, row: InputRow, file: _FileVersion, window: Mapping[str, object] | None = None
    ) -> str:
        return request_id(
            video_uri=row.video_uri,
            size=file.size,
            version=file.version,
            prompt=row.prompt,
            model_revision=self.revision,
            frames=self.job.frames,
            sampling=self.job.sampling,
            dtype=self.job.dtype,
            max_model_len=self.job.max_model_len,
            given_id=row.given_id,
            occurrence=row.occurrence,
            sparse=self._sparse_identity,
            window=window,
        )


def _file_version(uri: str) -> _FileVersion:
    """Nones for a file that cannot be read: the probe will give the reason."""
    try:
        file = storage.info(uri)
    except RequestError:
        return _FileVersion(None, None)
    return _FileVersion(file.size, file.version)


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(values)
    while batch := list(islice(remaining, size)):
        yield batch


# ----------------------------------------------------------------------------------------- planning


def plan_in_batches(
    pending: Iterable[PendingRequest],
    job: Job,
    checkpoint: Checkpoint,
    probe_all: ProbeAll = probe_all,
) -> Iterator[list[ProbedRequest]]:
    """Plans all requests, in batches that grow from `FIRST_BATCH` to `MAX_BATCH`."""
    remaining = iter(pending)
    size = FIRST_BATCH
    while batch := list(islice(remaining, size)):
        size = min(MAX_BATCH, 2 * size)
        yield list(plan_requests(batch, job, checkpoint, probe_all))


def plan_requests(
    pending: Sequence[PendingRequest],
    job: Job,
    checkpoint: Checkpoint,
    probe_all: ProbeAll = probe_all,
) -> Iterator[ProbedRequest]:
    """Reads the headers of the requests' videos, each once, and plans every request."""
    unprobed = {request.input_row.video_uri for request in pending if request.info is None}
    infos = probe_all({uri for uri in unprobed if uri})
    for request in pending:
        info = request.info or infos.get(request.input_row.video_uri)
        try:
            with video_errors("planning the request"):
                planned = _plan_request(request, info, job, checkpoint)
            yield planned
        except RequestError as error:
            yield FailedRequest(request, error, info if isinstance(info, VideoInfo) else None)


def _plan_request(
    request: PendingRequest, info: VideoInfo | RequestError | None, job: Job, checkpoint: Checkpoint
) -> PlannedRequest:
    if info is None:
        raise RequestError("invalid_request", "the input names no video in this row")
    if not request.input_row.prompt:
        raise RequestError("invalid_request", "the input names no question in this row")
    if isinstance(info, RequestError):
        raise info
    frame_plan = plan_frames(info, job.frames, checkpoint.geometry, request.window)
    num_frames = len(frame_plan.times)
    prompt_tokens = checkpoint.count_prompt_tokens(
        request.input_row.prompt, num_frames, frame_plan.fps, frame_plan.times
    )
    context = prompt_tokens + frame_plan.tokens
    max_model_len = resolve_max_model_len(job, checkpoint)
    if context >= max_model_len:
        raise RequestError(
            "context_too_long",
            f"{frame_plan.tokens} visual tokens of {num_frames} frames and {prompt_tokens} of the "
            f"prompt leave no room in {max_model_len}: "
            f"lower fps, max_frames, max_pixels or total_pixels",
        )
    return PlannedRequest(
        request.request_id,
        input_row=request.input_row,
        info=info,
        frame_plan=frame_plan,
        context=context,
        window=request.window,
    )
