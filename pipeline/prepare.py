"""From an input to waves, on one machine and from headers alone: which requests have no row yet, what their videos are,
and which are handed to an engine together. No frame is decoded, and Ray is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar

from pipeline import storage
from pipeline.config import Job, draft_of
from pipeline.identity import request_id
from pipeline.manifest import Manifest, open_manifest
from pipeline.probe import probe
from pipeline.sampling import plan_frames
from pipeline.schedule import plan
from pipeline.types import Item, Planned, RequestError, UsageError, VideoInfo, Wave
from std_core.checkpoint import Checkpoint

FIRST, POOL = 1024, 50_000  # requests that are planned at once: few at first, so that engines begin early, then more
FRAMES = 2_000_000  # planned at once: the times of that many are 64 MB
LOOKS = 16  # videos whose headers are read at the same time

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Pending:
    """A request that has no row yet."""

    request_id: str
    item: Item


@dataclass(frozen=True)
class Failed:
    """A request that is known to fail before a frame is decoded; `info` is None where the video could not be read."""

    pending: Pending
    error: RequestError
    info: VideoInfo | None = None


@dataclass
class Requests:
    """The input's requests, one pass, in its order.

    Attributes:
        ids: fingerprints of all that were seen so far, those with a row included; a repeated id is one request.
    """

    items: Iterable[Item]
    job: Job
    revision: str
    ids: set[bytes]

    def without_row(self, done: Set[bytes]) -> Iterator[Pending]:
        """Those that are not in `done`, which must not change meanwhile."""
        for batch in _batches(self.items, 1024):
            versions = _together(_version, {item.video_uri for item in batch})
            for item in batch:
                pending = Pending(self._id(item, *versions[item.video_uri]), item)
                fingerprint = bytes.fromhex(pending.request_id)
                if fingerprint not in self.ids:
                    self.ids.add(fingerprint)
                    if fingerprint not in done:
                        yield pending

    @cached_property
    def sparse(self) -> dict[str, object] | None:
        """Of `--mode sparse` the draft, which then makes the text; γ is no part of what it sees."""
        draft = draft_of(self.job) if self.job.mode == "sparse" else None
        return None if draft is None else {k: v for k, v in asdict(draft).items() if k != "gamma"}

    def _id(self, item: Item, size: int | None, version: str | None) -> str:
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
        )


def window_of(job: Job, checkpoint: Checkpoint) -> int:
    """Tokens that a request may have in all. Raises UsageError where more is asked for than the model has."""
    if job.max_model_len and job.max_model_len > checkpoint.max_model_len:
        raise UsageError(f"--max-model-len is {job.max_model_len}: the model's window is {checkpoint.max_model_len}")
    return job.max_model_len or checkpoint.max_model_len


def manifest_of(job: Job, prompts: Sequence[str]) -> Manifest:
    """The input, looked at. Raises UsageError."""
    return open_manifest(job.input, prompts, job.video_column or None, job.question_column or None)


def waves(
    pending: Iterable[Pending], job: Job, checkpoint: Checkpoint, fail: Callable[[Failed], None]
) -> Iterator[Wave]:
    """Waves of the requests that can be answered, pool by pool; `fail` gets each of the others once."""
    rest, size = iter(pending), FIRST
    while pool := list(islice(rest, size)):
        size = min(POOL, 2 * size)
        planned: list[Planned] = []
        frames = 0
        for found in chain.from_iterable(look(batch, job, checkpoint) for batch in _batches(pool, FIRST)):
            if isinstance(found, Failed):
                fail(found)
                continue
            planned.append(found)
            frames += len(found.plan.times)
            if frames > FRAMES:
                yield from plan(tuple(planned), job.max_num_seqs)
                planned, frames = [], 0
        yield from plan(tuple(planned), job.max_num_seqs)


def look(pool: Sequence[Pending], job: Job, checkpoint: Checkpoint) -> Iterator[Planned | Failed]:
    """Reads the headers of the videos, each once, and plans every request."""
    infos = _together(_probe, {p.item.video_uri for p in pool if p.item.video_uri})
    for pending in pool:
        info = infos.get(pending.item.video_uri)
        try:
            yield _plan(pending, info, job, checkpoint)
        except RequestError as error:
            yield Failed(pending, error, info if isinstance(info, VideoInfo) else None)


def _plan(pending: Pending, info: VideoInfo | RequestError | None, job: Job, checkpoint: Checkpoint) -> Planned:
    if info is None or not pending.item.prompt:
        missing = "video" if info is None else "question"
        raise RequestError("invalid_request", f"the input names no {missing} in this row")
    if isinstance(info, RequestError):
        raise info
    frames = plan_frames(info, job.frames, checkpoint.geometry)
    text = checkpoint.prompt_tokens(pending.item.prompt, len(frames.times), frames.fps)
    window = window_of(job, checkpoint)
    if text + frames.tokens >= window:
        raise RequestError(
            "context_too_long",
            f"{frames.tokens} visual tokens of {len(frames.times)} frames and {text} of the prompt leave no room in "
            f"{window}: lower fps, max_frames, max_pixels or total_pixels",
        )
    return Planned(pending.request_id, pending.item, info, frames, text + frames.tokens)


def _probe(uri: str) -> VideoInfo | RequestError:
    try:
        return probe(uri)
    except RequestError as error:
        return error


def _version(uri: str) -> tuple[int | None, str | None]:
    """Size and version of a video; Nones where it cannot be looked at, for which the probe will find the reason."""
    try:
        found = storage.info(uri)
    except RequestError:
        return None, None
    return found.size, found.version


def _together(function: Callable[[T], R], arguments: Iterable[T]) -> dict[T, R]:
    """What a function that mostly waits for storage returns for each argument."""
    known = list(arguments)
    with ThreadPoolExecutor(max(1, min(LOOKS, len(known)))) as threads:
        return dict(zip(known, threads.map(function, known), strict=True))


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch
