"""Decodes the planned frames of one video, under limits.

Local files go through decord, then PyAV. Remote files go through PyAV by range requests if the plan
needs less than half of the file; otherwise they are downloaded to a temporary folder and decoded as
local files.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pipeline import storage
from pipeline.records import ERROR_CODES, FramePlan, Frames, RequestError, VideoInfo
from pipeline.video.decode_job import DecodeError, DecodeJob
from pipeline.video.sandbox import AttemptLimits, DecodeOutcome, return_worker, take_worker

# label to "module:function"; tried in this order
DECODERS = {
    "decord": "pipeline.video.decord_reader:decode",
    "pyav": "pipeline.video.pyav_reader:decode",
}
_DOWNLOAD = "pipeline.video.download:download"
_FINAL_CODES = frozenset(  # errors that no other decoder can avoid
    ("not_found", "access_denied", "storage_error", "not_a_video", "no_video_stream")
)


@dataclass(frozen=True)
class Limits:
    """What decoding one video may take.

    Args:
        deadline: s of wall time for all attempts; each but the last gets half of the rest.
        cpu_seconds: s of CPU time per attempt; by default as much as its wall time.
        memory_bytes: private memory of an attempt.
        download_bytes: size of the largest remote file that is copied to the local disk.
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
    decoders: Mapping[str, str] | None = None,
) -> Frames:
    """Decodes the planned frames: those that exist and are intact, each once, in order.

    Args:
        uri: of the video that `info` and `plan` belong to.
        limits: the deadline holds per window of the plan.
        decoders: label to "module:function", in the order in which they are tried.

    Raises:
        RequestError: `truncated_file` where under half of the planned frames decode, `zero_frames`
            where none does; `decode_crashed`, `decode_timeout`, `decode_error` of the last decoder
            where all failed; `too_large` to download; `storage_error` where the file is not the
            one that was probed, before or after decoding; storage's own codes.
    """
    local_path = storage.local_path(uri)
    job = DecodeJob(
        source=local_path or uri,
        remote=local_path is None,
        times=plan.times,
        start=info.start,
        fps=info.fps,
        height=plan.height,
        width=plan.width,
        frame_bytes=info.height * info.width * 3,
        size_bytes=info.size_bytes,
    )
    attempts = _Attempts(
        plan,
        limits,
        name=storage.display_uri(uri),
        deadline_at=time.monotonic() + limits.deadline * plan.windows,
    )
    decoders = decoders or DECODERS
    _check_version(uri, info, attempts.name)
    if job.remote:
        success = _decode_remote(attempts, job, decoders)
    else:
        success = attempts.first_success(job, decoders)
    _check_version(uri, info, attempts.name)  # it may have been replaced meanwhile
    if success is None:
        raise attempts.failure()
    outcome = success.outcome
    assert outcome.pixels is not None
    return Frames(
        outcome.pixels,
        pts=outcome.pts,
        fps=plan.fps,
        frames_lost=outcome.num_lost,
        rotation=info.rotation,
        decoder=success.decoder,
        frame_indices=outcome.frame_indices,
    )


def _check_version(uri: str, info: VideoInfo, name: str) -> None:
    """Raises RequestError if the file is another one than `info` describes. Its frames would be
    described under the old version, at times that were planned for the old file."""
    file = storage.info(uri)
    if (file.size, file.version) != (info.size_bytes, info.version):
        raise RequestError(
            "storage_error",
            f"{name} was replaced after its headers were read: run again to answer the new version",
        )


def _decode_remote(
    attempts: _Attempts, job: DecodeJob, decoders: Mapping[str, str]
) -> _Success | None:
    """Decodes by range requests if possible, else from a copy on the local disk."""
    by_ranges = {label: decoder for label, decoder in decoders.items() if label == "pyav"}
    if success := attempts.first_success(job, by_ranges, more_follow=True):
        return success
    if job.size_bytes > attempts.limits.download_bytes:
        raise RequestError(
            "too_large",
            f"{attempts.name} has {job.size_bytes} bytes, more than may be downloaded at once",
        )
    with tempfile.TemporaryDirectory(prefix="video-") as folder:
        path = str(Path(folder) / "video")
        seconds = attempts.seconds_left / 2
        outcome = attempts.run(_DOWNLOAD, replace(job, download_path=path), seconds)
        if outcome.error:
            reason = outcome.error.reason
            raise RequestError(
                outcome.error.code, f"{attempts.name} could not be downloaded: {reason}"
            )
        return attempts.first_success(replace(job, source=path, remote=False), decoders)


class _Success(NamedTuple):
    decoder: str  # its label
    outcome: DecodeOutcome


class _Failure(NamedTuple):
    decoder: str  # its label
    code: str
    reason: str


@dataclass
class _Attempts:
    """The attempts at one video, and the failures so far."""

    plan: FramePlan
    limits: Limits
    name: str  # of the video, for messages
    deadline_at: float  # monotonic clock, s
    failures: list[_Failure] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline_at - time.monotonic())

    def first_success(
        self, job: DecodeJob, decoders: Mapping[str, str], more_follow: bool = False
    ) -> _Success | None:
        """Tries the decoders in order; `more_follow` leaves time for attempts after these."""
        for number, (label, decoder) in enumerate(decoders.items(), 1):
            is_last = number == len(decoders) and not more_follow
            seconds = self.seconds_left if is_last else self.seconds_left / 2
            outcome = self.run(decoder, job, seconds)
            error = outcome.error or self._too_few_frames(outcome)
            if error is None:
                return _Success(label, outcome)
            self._add_failure(label, error)
        return None

    def run(self, decoder: str, job: DecodeJob, seconds: float) -> DecodeOutcome:
        """Makes one attempt in a worker process."""
        try:
            worker = take_worker()
        except DecodeError as error:
            return DecodeOutcome(error=error)
        try:
            cpu_seconds = self.limits.cpu_seconds or math.ceil(seconds) + 1
            limits = AttemptLimits(self.limits.memory_bytes, cpu_seconds, seconds)
            return worker.run(decoder, job, limits)
        finally:
            return_worker(worker)

    def failure(self) -> RequestError:
        """The error of a video that no decoder could decode: `truncated_file` if any decoder says
        so, else the last one's code. Decoders that refused the file count only if all did."""
        tried = [failure for failure in self.failures if failure.code != "unsuited"]
        failures = tried or self.failures
        codes = [f.code if f.code in ERROR_CODES else "decode_error" for f in failures]
        code = "truncated_file" if "truncated_file" in codes else codes[-1]
        reasons = ", ".join(f"{failure.decoder} ({failure.reason})" for failure in failures)
        return RequestError(code, f"{self.name} could not be decoded: {reasons}")

    def _too_few_frames(self, outcome: DecodeOutcome) -> DecodeError | None:
        """The error of an attempt that found none, or less than half, of the planned frames. With
        several windows in the plan the share is checked per window, see `windows`."""
        if not outcome.pts:
            return DecodeError("zero_frames", "no frame was found")
        planned = len(self.plan.times)
        intact = planned - outcome.num_lost
        if self.plan.windows == 1 and 2 * intact < planned:
            return DecodeError("truncated_file", f"only {intact} of {planned} frames are intact")
        return None

    def _add_failure(self, label: str, error: DecodeError) -> None:
        """Notes a failure; raises RequestError for one that no other decoder can avoid."""
        if error.code in _FINAL_CODES:
            named = self.name in error.reason
            raise RequestError(
                error.code, error.reason if named else f"{self.name}: {error.reason}"
            )
        if error.code != "download":  # not a failure: the file is downloaded next
            self.failures.append(_Failure(label, error.code, error.reason))
