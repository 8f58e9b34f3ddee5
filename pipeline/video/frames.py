"""The frames stage: the planned frames of one video, decoded under limits, whatever the file does.

Local files go through decord, then PyAV. Remote ones through PyAV over range requests when the plan
needs less than half of the file, else they are downloaded to a temporary folder, deleted
afterwards, and treated as local."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import storage
from pipeline.records import ERROR_CODES, FramePlan, Frames, RequestError, VideoInfo
from pipeline.video.decode_job import DecodeError, DecodeJob
from pipeline.video.frame_plan import plan_frames
from pipeline.video.sandbox import DecodeOutcome, return_worker, take_worker

__all__ = ["Limits", "decode", "plan_frames"]

DECODERS = {
    "decord": "pipeline.video.decord_reader:decode",
    "pyav": "pipeline.video.pyav_reader:decode",
}
_DOWNLOAD = "pipeline.video.download:download"
_FINAL = frozenset(
    ("not_found", "access_denied", "storage_error", "not_a_video", "no_video_stream")
)  # for any decoder


@dataclass(frozen=True)
class Limits:
    """What one video may take.

    Args:
        deadline: s of wall time for all attempts; each but the last gets half of what is left.
        cpu_seconds: s of CPU time, per attempt; by default as long as the attempt may take.
        memory_bytes: private memory of an attempt.
        download_bytes: the largest remote file that is copied to the local disk.
    """

    deadline: float = 120.0
    cpu_seconds: int | None = None
    memory_bytes: int = 3 << 30
    download_bytes: int = 16 << 30


DEFAULT_LIMITS = Limits()


def decode(
    uri: str,
    info: VideoInfo,
    plan: FramePlan,
    limits: Limits = DEFAULT_LIMITS,
    decoders: dict[str, str] | None = None,
) -> Frames:
    """The frames of `plan`: those that exist and are intact, each once, in order.

    Args:
        uri: where the video lies; `info` and `plan` are its own.
        limits: what it may take; of the deadline each window that the plan is for has one.
        decoders: name to "module:function", in the order in which they are tried.

    Raises: RequestError: `truncated_file` where under half of the planned frames decode,
        `zero_frames` where none does;
            `decode_crashed`, `decode_timeout`, `decode_error` where every decoder failed, by the
            last one's failure; `too_large`; storage's own codes.
    """
    local = storage.local_path(uri)
    name = storage.display_uri(uri)
    run = _Run(plan, limits, time.monotonic() + limits.deadline * plan.windows, name)
    order = decoders or DECODERS
    job = DecodeJob(
        source=local or uri,
        remote=local is None,
        times=plan.times,
        start=info.start,
        fps=info.fps,
        height=plan.height,
        width=plan.width,
        frame_bytes=info.height * info.width * 3,
        size_bytes=info.size_bytes,
    )
    won = run.first_good(job, order) if local else _remote(run, job, order)
    if won is None:
        raise run.failure()
    label, outcome = won
    assert outcome.pixels is not None
    return Frames(
        outcome.pixels,
        pts=outcome.pts,
        fps=plan.fps,
        frames_lost=outcome.frame_indices.count(-1),
        rotation=info.rotation,
        decoder=label,
        frame_indices=outcome.frame_indices,
    )


def _remote(run: _Run, job: DecodeJob, order: dict[str, str]) -> tuple[str, DecodeOutcome] | None:
    """In pieces if that is enough, else by a copy on the local disk."""
    pieces = {label: decoder for label, decoder in order.items() if label == "pyav"}
    if won := run.first_good(job, pieces, more=True):
        return won
    if job.size_bytes > run.limits.download_bytes:
        raise RequestError(
            "too_large",
            f"{run.name} has {job.size_bytes} bytes, more than may be downloaded at once",
        )
    with tempfile.TemporaryDirectory(prefix="video-") as folder:
        copy = replace(job, target=str(Path(folder) / "video"))
        outcome = run.attempt(_DOWNLOAD, copy, run.left / 2)
        if outcome.error:
            raise RequestError(
                outcome.error[0], f"{run.name} could not be downloaded: {outcome.error[1]}"
            )
        return run.first_good(replace(job, source=copy.target, remote=False), order)


@dataclass
class _Run:
    """The attempts at one video, and why those so far failed."""

    plan: FramePlan
    limits: Limits
    ends: float  # on the monotonic clock, s
    name: str  # of the video, fit for messages
    failures: list[tuple[str, str, str]] = field(default_factory=list)  # decoder, code, reason

    @property
    def left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    def first_good(
        self, job: DecodeJob, order: dict[str, str], more: bool = False
    ) -> tuple[str, DecodeOutcome] | None:
        """The first decoder's result that is good enough; `more` if further attempts follow
        these."""
        for number, (label, decoder) in enumerate(order.items(), 1):
            last = number == len(order) and not more
            outcome = self._judged(self.attempt(decoder, job, self.left if last else self.left / 2))
            if outcome.error is None:
                return label, outcome
            self._note(label, *outcome.error)
        return None

    def attempt(self, decoder: str, job: DecodeJob, seconds: float) -> DecodeOutcome:
        try:
            worker = take_worker()
        except DecodeError as error:
            return DecodeOutcome(error=(error.code, error.reason))
        try:
            cpu = self.limits.cpu_seconds or math.ceil(seconds) + 1
            return worker.run(decoder, job, self.limits.memory_bytes, cpu, seconds)
        finally:
            return_worker(worker)

    def failure(self) -> RequestError:
        """The last decoder's failure speaks for all, unless one found the file cut short."""
        told = [failure for failure in self.failures if failure[1] != "unsuited"] or self.failures
        codes = [code if code in ERROR_CODES else "decode_error" for _, code, _ in told]
        reasons = ", ".join(f"{label} ({reason})" for label, _, reason in told)
        code = "truncated_file" if "truncated_file" in codes else codes[-1]
        return RequestError(code, f"{self.name} could not be decoded: {reasons}")

    def _judged(self, outcome: DecodeOutcome) -> DecodeOutcome:
        """An error where too little was found."""
        if outcome.error is None and not outcome.pts:
            return DecodeOutcome(error=("zero_frames", "no frame was found"))
        planned = len(self.plan.times)
        intact = planned - outcome.frame_indices.count(-1)
        if outcome.error is None and self.plan.windows == 1 and 2 * intact < planned:
            return DecodeOutcome(
                error=("truncated_file", f"only {intact} of {planned} frames are intact")
            )
        return outcome

    def _note(self, label: str, code: str, reason: str) -> None:
        """Keeps a failure for the message; raises one that no other decoder can mend."""
        if code in _FINAL:
            raise RequestError(code, reason if self.name in reason else f"{self.name}: {reason}")
        if code != "download":
            self.failures.append((label, code, reason))
