"""The driver's state: where every request in flight is, and which engine each replica runs.

Records only. `driver.Driver` alone changes them; the other modules of this package read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pipeline.driver.backend import EngineHandle, Future
from pipeline.driver.suspects import SuspectGroup, Suspects
from pipeline.records import (
    EngineConfig,
    FramePlan,
    Frames,
    PlannedRequest,
    RequestError,
    RunSnapshot,
    Wave,
)
from pipeline.video.windows import frames_of_window, group_into_spans
from std_core.types import Result


@dataclass(frozen=True)
class DriverLimits:
    """How far the driver works ahead of an engine, and how long an engine lives.

    Args:
        in_engine: requests in an engine, as a multiple of its slots: those in the slots, and as
            many queued behind them.
        ahead: requests in an engine, decoded for it, or decoding for it, as a multiple of its
            slots.
        requests_per_engine: completed requests after which an engine is replaced, which frees the
            memory that it has leaked.
    """

    in_engine: int = 2
    ahead: int = 3
    requests_per_engine: int = 10_000


DEFAULT_LIMITS = DriverLimits()


# ---------------------------------------------------------------------------------------- requests


@dataclass(eq=False)
class WaveProgress:
    """A wave under way."""

    wave: Wave
    incomplete: int  # requests
    results: list[Result] = field(default_factory=list)  # of requests that ran with its config


class FramesInGroup(NamedTuple):
    """The frames of one request among those that were decoded in one pass."""

    frames: Frames  # without pixels
    pixel_indices: tuple[int, ...]  # of the frames in the pixels of the pass


@dataclass(eq=False)
class DecodeGroup:
    """Requests of a wave whose frames are decoded in one pass over the video."""

    wave_progress: WaveProgress  # of the requests' wave
    requests: tuple[PlannedRequest, ...]
    frame_plan: FramePlan  # of the pass
    nbytes: int  # of its frames, as planned
    incomplete: int  # requests
    pixels: Future | None = None  # None: not decoded yet, lost, or no longer needed
    frames: dict[str, FramesInGroup] = field(default_factory=dict)  # by `frames_key`
    attempts: int = 0  # decode tasks so far
    crashes: int = 0  # of them, those whose process died

    def store(self, frames: Frames, pixels: Future) -> dict[str, RequestError]:
        """Store the frames of a pass; return errors by `frames_key`, where too few were found."""
        self.pixels = pixels
        errors = {}
        plans = {request.frames_key: request.frame_plan for request in self.requests}
        for key, plan in plans.items():
            own, pixel_indices = frames_of_window(frames, self.frame_plan, plan)
            if isinstance(own, RequestError):
                errors[key] = own
            else:
                self.frames[key] = FramesInGroup(own, pixel_indices)
        return errors

    def frames_of(self, request: PlannedRequest) -> Frames | None:
        """A request's frames without pixels; None if they were never decoded."""
        found = self.frames.get(request.frames_key)
        return None if found is None else found.frames

    @property
    def config(self) -> EngineConfig:
        """The engine config of the requests' wave."""
        return self.wave_progress.wave.engine_config


def decode_groups(wave: Wave) -> Iterator[DecodeGroup]:
    """The requests of a wave, in its order, grouped by what is decoded in one pass."""
    progress = WaveProgress(wave, incomplete=len(wave.requests))
    for span in group_into_spans(wave.requests):
        yield DecodeGroup(
            progress,
            requests=span.requests,
            frame_plan=span.plan,
            nbytes=span.nbytes,
            incomplete=len(span.requests),
        )


@dataclass(eq=False)
class InFlightRequest:
    """A request between the start of its decode task and its completion."""

    request: PlannedRequest
    group: DecodeGroup
    engines: int = 0  # engines that it was fed to


# ----------------------------------------------------------------------------------------- engines


class FedRequest(NamedTuple):
    """A request in an engine, and the config with which it was fed."""

    request: PlannedRequest
    config: EngineConfig


@dataclass(eq=False)
class EngineState:
    """One engine, from the call that starts it until it is killed."""

    handle: EngineHandle = None  # None: no engine was started yet
    starting: list[Future] = field(default_factory=list)  # of ranks that are not ready yet
    node: str | None = None
    results: Any = None  # stream of results, once it runs
    other_ranks: list[Future] = field(default_factory=list)  # resolve only when a rank ends
    requests: dict[str, FedRequest] = field(default_factory=dict)  # by id, in the order of feeding
    trial: SuspectGroup | None = None  # suspects that it runs, and nothing else
    config: EngineConfig | None = None  # with which it is fed
    config_index: int = 0  # of `config`, see `FeedBatch`
    config_arrived: bool = False  # whether a batch with `config` has arrived
    completed: int = 0  # requests
    heartbeat: Future | None = None  # the progress counter, if it is requested now
    heartbeat_at: float = 0.0  # when it was requested, s
    progress_counter: int = -1  # the newest one, see `Backend.heartbeat`
    progress_at: float = 0.0  # when the engine last made progress, s

    @property
    def running(self) -> bool:
        return self.results is not None

    def futures(self) -> Iterator[Future]:
        """All futures that the engine can resolve."""
        yield from self.starting
        yield from self.other_ranks
        if self.results is not None:
            yield self.results
        if self.heartbeat is not None:
            yield self.heartbeat


@dataclass(eq=False)
class Replica:
    """One of the engines that run side by side, with the work that is assigned to it.

    Over time a replica runs several engines, each of which replaces the one before.
    """

    index: int
    slots: int
    engine: EngineState = field(default_factory=EngineState)
    undecoded: deque[DecodeGroup] = field(default_factory=deque)  # of its waves
    decoding: int = 0  # requests that wait for a running decode task
    decoded: deque[PlannedRequest] = field(default_factory=deque)  # wait for the engine

    @property
    def ahead(self) -> int:
        """Requests in the engine, decoded for it, or decoding for it."""
        return self.decoding + len(self.decoded) + len(self.engine.requests)

    def within_slots(self, config: EngineConfig) -> EngineConfig:
        """The same config with no more slots than the replica has."""
        return replace(config, max_num_seqs=min(config.max_num_seqs, self.slots))


# ----------------------------------------------------------------------------------------- the run


@dataclass(eq=False)
class RunningDecode:
    """A decode task under way."""

    group: DecodeGroup
    replica: Replica
    waiting: list[PlannedRequest]  # requests that the replica's engine gets afterwards
    pixels: Future


@dataclass(frozen=True)
class RunningFeed:
    """A batch on its way to an engine."""

    replica: Replica
    engine: EngineState  # which may have been replaced since
    request_ids: list[str]
    pixels: Future


@dataclass(eq=False)
class RunState:
    """Everything that the driver knows of a run.

    A request in flight is in exactly one of `RunningDecode.waiting`, `Replica.decoded`, `returned`,
    `EngineState.requests`, and the groups of `suspects`. The queues `decoded` and `returned` may
    also hold requests that are no longer in flight, because their frames were lost and could not
    be decoded again.
    """

    replicas: list[Replica]
    in_flight: dict[str, InFlightRequest] = field(default_factory=dict)  # by request id
    decodes: dict[Future, RunningDecode] = field(default_factory=dict)
    feeds: dict[Future, RunningFeed] = field(default_factory=dict)
    returned: deque[PlannedRequest] = field(default_factory=deque)  # decoded for engines that died
    suspects: Suspects = field(default_factory=Suspects)
    frame_bytes: int = 0  # of frames that are decoding or kept
    peak_frame_bytes: int = 0
    decoded_videos: int = 0
    completed: int = 0  # requests
    blamed: int = 0  # requests that got an error row because they ended engines
    deaths: int = 0  # engines lost
    idle_deaths: int = 0  # engines lost in a row that had no request
    progress_at: float = 0.0  # when anything last happened, s
    checked_at: float = 0.0  # when health was last checked, s

    def is_being_fed(self, engine: EngineState) -> bool:
        """Whether a batch is on its way to the engine."""
        return any(feed.engine is engine for feed in self.feeds.values())

    def snapshot(self) -> RunSnapshot:
        """Count requests by stage, and engines."""
        running = sum(replica.engine.running for replica in self.replicas)
        decoded = sum(len(replica.decoded) for replica in self.replicas)
        return RunSnapshot(
            decoding=len(self.decodes),
            waiting=decoded + len(self.returned),
            in_engine=sum(len(replica.engine.requests) for replica in self.replicas),
            engines=running,
            starting=len(self.replicas) - running,
            deaths=self.deaths,
            suspects=self.suspects.count,
            frame_bytes=self.frame_bytes,
            peak_frame_bytes=self.peak_frame_bytes,
        )
