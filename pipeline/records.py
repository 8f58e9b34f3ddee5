"""The records that pass between the stages of the pipeline, in the order in which they are filled:
the command line (`FrameOptions`), the manifest (`InputRow`, `PendingRequest`), the probe
(`VideoInfo`), the plan (`FramePlan`, `PlannedRequest`, `Wave`), the frames stage (`Frames`), the
driver (`CompletedRequest`, `RunSnapshot`).

A failure of one request is a `RequestError` with one of the output contract's codes. A `UsageError`
ends a run before it starts (exit code 2), a `RunError` ends a running one (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from std_core.types import Draft, GammaSchedule, RequestError, Result

ERROR_CODES = frozenset(
    {
        "not_found",
        "access_denied",
        "storage_error",
        "empty_file",
        "not_a_video",
        "no_video_stream",
        "zero_frames",
        "truncated_file",
        "decode_error",
        "decode_timeout",
        "decode_crashed",
        "too_large",
        "too_few_frames",
        "context_too_long",
        "invalid_request",
        "placeholder_mismatch",
        "nan_logits",
        "out_of_memory",
        "worker_killed",
        "engine_timeout",
    }
)

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT
RESUME_HINT = "what is finished is written, and the same command resumes"


class UsageError(Exception):
    """The configuration or the input is wrong. The message is one sentence: what, and where."""


class RunError(Exception):
    """A run ends early (exit code 1). What is written stays, and a rerun resumes. The message is
    one sentence: the reason."""


class Interrupted(RunError):
    """A signal ended the run.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


def _frame_flag(default: Any, text: str) -> Any:
    """A field with the help text of its flag, which `pipeline.command_line` makes of it."""
    return field(default=default, metadata={"help": text, "group": "Frames"})


@dataclass(frozen=True)
class FrameOptions:
    """Which frames of a video are sampled, and their size, under Qwen's names."""

    fps: float = _frame_flag(2.0, "frames sampled per second; ignored where --nframes is given")
    nframes: int | None = _frame_flag(None, "frames sampled in all")
    min_frames: int = _frame_flag(4, "frames sampled by --fps, at least")
    max_frames: int = _frame_flag(768, "frames sampled by --fps, at most")
    min_pixels: int | None = _frame_flag(
        None, "pixels of a resized frame, at least; default: the model's"
    )
    max_pixels: int | None = _frame_flag(
        None, "pixels of a resized frame, at most; default: the model's"
    )
    total_pixels: int | None = _frame_flag(
        None, "pixels of all frames of a video together, at most"
    )
    video_start: float | None = _frame_flag(None, "first second of the video that is used")
    video_end: float | None = _frame_flag(None, "last second of the video that is used")

    def __post_init__(self) -> None:
        if self.fps <= 0:
            raise UsageError(f"fps is {self.fps}: it has to be above 0")
        if self.nframes is not None and self.nframes < 1:
            raise UsageError(f"nframes is {self.nframes}: at least one frame is needed")
        if not 1 <= self.min_frames <= self.max_frames:
            raise UsageError(
                f"min_frames {self.min_frames} and max_frames {self.max_frames}: 1 ≤ min ≤ max is "
                "needed"
            )
        for name in ("min_pixels", "max_pixels", "total_pixels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}: it has to be above 0")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise UsageError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        if self.video_start is not None and self.video_start < 0:
            raise UsageError(f"video_start is {self.video_start}: it has to be 0 or later")
        if self.video_end is not None and self.video_end <= (self.video_start or 0):
            raise UsageError(
                f"video_end {self.video_end} is not after video_start {self.video_start or 0}"
            )


@dataclass(frozen=True)
class InputRow:
    """One prompt about one video, as the input has it.

    Args:
        columns: the manifest's columns, which are carried to the output.
        given_id: the manifest's own `request_id`, if it has one.
        occurrence: number of equal rows before this one.
    """

    video_uri: str
    prompt: str
    columns: dict[str, object] = field(default_factory=dict)
    given_id: str | None = None
    occurrence: int = 0


@dataclass(frozen=True)
class VideoInfo:
    """What a container's headers say."""

    uri: str
    size_bytes: int
    version: str  # ETag or mtime; changes when the file does
    container: str
    codec: str
    duration: float  # s
    start: float  # s, first presentation time
    frames: int
    exact: bool  # whether `frames` comes from an intact index; else it is an upper bound
    fps: float  # average
    height: int  # as displayed, after the rotation
    width: int
    rotation: int  # degrees counter-clockwise, from the display matrix: 0, 90, 180 or 270


@dataclass(frozen=True)
class FramePlan:
    """Which times of a video are decoded, and to which size. Fixed before a frame is decoded."""

    times: tuple[float, ...]  # s, presentation times from the start of the stream, ascending
    height: int
    width: int
    fps: float  # sampled frames per second
    tokens: int  # visual tokens
    windows: int = 1  # number of neighbouring windows that are decoded in one pass


@dataclass(frozen=True)
class Frames:
    """Decoded and resized frames of one video."""

    pixels: np.ndarray  # (T, height, width, 3) uint8, RGB
    pts: tuple[float, ...]  # s, presentation times of the decoded frames
    fps: float  # sampled
    frames_lost: int
    rotation: int
    decoder: str
    # per planned time, the index of its frame; -1 if the frame is lost
    frame_indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedRequest:
    """A request whose video was probed and whose context length is known.

    Args:
        context: tokens of the prompt, visual ones included.
        window: start and end in seconds of the part of the video that the request is about; None
            for what `FrameOptions` select.
    """

    request_id: str
    input_row: InputRow
    info: VideoInfo
    frame_plan: FramePlan
    context: int
    window: tuple[float, float] | None = None

    @property
    def frames_key(self) -> str:
        """Equal for requests that share frames. A NUL separates the parts, since no URI has
        one."""
        if self.window is None:
            return self.info.uri
        return f"{self.info.uri}\0{self.window[0]:.6f}-{self.window[1]:.6f}"

    def failed(self, error: RequestError) -> FailedRequest:
        """This request as one that fails before its frames are decoded."""
        pending = PendingRequest(self.request_id, self.input_row, self.window)
        return FailedRequest(pending, error, self.info)


@dataclass(frozen=True)
class DraftOption:
    """One way to decode a wave, and what is predicted of it.

    Args:
        draft: None decodes densely.
        slots: rows that decode at a time.
        acceptance: a, the probability that a drafted token is accepted if those before it are.
        bytes_per_token: bytes read per generated token.
        speedup_bound: speedup over dense decoding if only these bytes took time.
        seconds_per_request: decoding, KV selection, gather and a second model's prefill.
        speedup: predicted, over dense decoding.
        row_round_s: seconds of a round, per row, without the history's correction.
        row_draft_token_s: seconds, per row, by which one more drafted token makes a round longer.
        memory: (purpose, bytes) for `slots` × the wave's longest request.
        gamma_schedule: γ of each round; None: the draft's own γ throughout.
    """

    draft: Draft | None
    slots: int
    acceptance: float = 0.0
    bytes_per_token: float = 0.0
    speedup_bound: float = 1.0
    seconds_per_request: float = 0.0
    speedup: float = 1.0
    row_round_s: float = 0.0
    row_draft_token_s: float = 0.0
    memory: tuple[tuple[str, float], ...] = ()
    gamma_schedule: GammaSchedule | None = None

    @property
    def widest_draft(self) -> Draft | None:
        """The draft with the largest γ that any of its rounds can have."""
        if self.draft is None or self.gamma_schedule is None:
            return self.draft
        return replace(self.draft, gamma=max(self.draft.gamma, self.gamma_schedule.max_gamma))


@dataclass(frozen=True)
class EngineConfig:
    """How an engine decodes.

    Configurations that differ in the γ schedule only are equal: an engine changes its schedule
    without waiting for its rows to finish.

    Args:
        draft: with the largest γ that any round can have; None decodes densely.
        max_num_seqs: slots.
    """

    draft: Draft | None
    max_num_seqs: int
    gamma_schedule: GammaSchedule | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Wave:
    """What an engine gets at once: requests of similar context length, in the order in which they
    enter its slots.

    Args:
        max_num_seqs: slots.
        draft: None decodes densely.
        options: the ways that the planner compared, the chosen one first, the others by predicted
            time.
    """

    requests: tuple[PlannedRequest, ...]
    max_num_seqs: int
    draft: Draft | None = None
    options: tuple[DraftOption, ...] = ()

    @property
    def gamma_schedule(self) -> GammaSchedule | None:
        """γ of each round; None: the draft's own γ throughout."""
        return self.options[0].gamma_schedule if self.options else None

    @property
    def engine_config(self) -> EngineConfig:
        draft = self.options[0].widest_draft if self.options else self.draft
        return EngineConfig(draft, self.max_num_seqs, self.gamma_schedule)


@dataclass(frozen=True)
class CompletedRequest:
    """A request that was handed to an engine, or whose frames could not be decoded.

    Args:
        frames: without pixels; None if decoding failed.
        attempts: number of engines that got the request or, if none did, of attempts to decode it.
        draft: of the last engine.
    """

    request: PlannedRequest
    frames: Frames | None
    result: Result
    attempts: int
    draft: Draft | None


@dataclass(frozen=True)
class PendingRequest:
    """A request that has no row yet.

    Args:
        window: as in `PlannedRequest`. The number of a video's windows depends on its duration, so
            `info` is known too where there are windows.
    """

    request_id: str
    input_row: InputRow
    window: tuple[float, float] | None = None
    info: VideoInfo | RequestError | None = None


@dataclass(frozen=True)
class FailedRequest:
    """A request that fails before its frames are decoded. `info` is None if the video could not be
    probed."""

    pending: PendingRequest
    error: RequestError
    info: VideoInfo | None = None

    @property
    def request_id(self) -> str:
        return self.pending.request_id


ProbedRequest = PlannedRequest | FailedRequest  # what planning a `PendingRequest` gives


@dataclass(frozen=True)
class RunSnapshot:
    """Counts of the driver's state at one moment: requests without a row by stage, and engines."""

    decoding: int = 0  # videos
    waiting: int = 0  # decoded requests that no engine has yet
    in_engine: int = 0  # requests fed to an engine and not answered
    engines: int = 1  # running
    starting: int = 0  # engines requested and not running yet
    deaths: int = 0  # engines lost so far
    suspects: int = 0  # requests that wait to run again because their engine died
    frame_bytes: int = 0  # of frames that are decoding or kept
    peak_frame_bytes: int = 0  # maximum of `frame_bytes` so far

    @property
    def decoded(self) -> int:
        """Requests whose frames are decoded: in an engine or waiting for one."""
        return self.waiting + self.in_engine + self.suspects
