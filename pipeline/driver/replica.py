"""What is where in a run: videos that decode, requests that wait for an engine or sit in one.
Bookkeeping alone: knows no Ray and starts nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.driver.suspects import Group
from pipeline.records import EngineConfig, FramePlan, Frames, PlannedRequest, RequestError, Wave
from pipeline.video.windows import frames_of_window, group_into_spans
from std_core.types import Result

HELD = 2  # × slots requests that an engine is handed: those in its slots, and as many in line
# × slots requests that are in an engine, decoded for it, or decoding: 2 × slots ahead of the slots
AHEAD = 3


@dataclass(eq=False)
class WaveProgress:
    """A wave on its way: what is known of its requests that are answered."""

    wave: Wave
    left: int
    results: list[Result] = field(default_factory=list)


@dataclass(eq=False)
class Video:
    """Requests whose frames are decoded in one pass, from the plan until the last of them is
    answered."""

    turn: WaveProgress
    requests: list[PlannedRequest]
    plan: FramePlan  # of the pass
    nbytes: int  # of its frames as planned
    left: int
    pixels: Any = None  # reference to them, until the last request is answered
    parts: dict[str, tuple[Frames, tuple[int, ...]]] = field(
        default_factory=dict
    )  # by footage, see `windows.frames_of_window`
    tries: int = 0  # how often it was decoded
    crashes: int = 0  # how often that ended its process

    def arrived(self, frames: Frames, pixels: Any) -> dict[str, RequestError]:
        """Takes what was decoded; returns why of some footage nothing can be shown."""
        self.pixels = pixels
        failed = {}
        for frames_key, frame_plan in {
            request.frames_key: request.frame_plan for request in self.requests
        }.items():
            own, numbers = frames_of_window(frames, self.plan, frame_plan)
            if isinstance(own, RequestError):
                failed[frames_key] = own
            else:
                self.parts[frames_key] = own, numbers
        return failed

    def frames_of(self, request: PlannedRequest) -> Frames | None:
        """What is known of a request's frames, without pixels."""
        return self.parts[request.frames_key][0] if request.frames_key in self.parts else None


def videos(wave: Wave) -> Iterator[Video]:
    """The wave's requests by what is decoded together, in its order."""
    turn = WaveProgress(wave, len(wave.requests))
    for span in group_into_spans(wave.requests):
        yield Video(
            turn,
            requests=list(span.requests),
            plan=span.plan,
            nbytes=span.nbytes,
            left=len(span.requests),
        )


@dataclass(eq=False)
class Replica:
    """The place of one engine, which outlives the engines that follow each other in it: videos of
    its waves are in `coming`, decoded requests in `queue` wait for it, those in `held` were handed
    to it, in that order, and are not answered yet."""

    number: int
    slots: int
    engine: Any = None
    ready: list[Any] = field(
        default_factory=list
    )  # references that resolve to the engine's node once it runs
    node: str | None = None
    results: Any = None  # its stream, once it runs
    others: list[Any] = field(
        default_factory=list
    )  # references that are there once a part of the engine has ended
    beat: Any = None  # reference to the newest answer to "how far are you"
    pulse: int = -1  # that answer
    alive: float = field(default_factory=time.monotonic)  # when the engine last moved
    asked: float = 0.0  # when it was asked how far it is
    answered: int = 0  # requests, by the engine that runs now
    retires: bool = False  # whether it is handed nothing more
    trial: Group | None = None  # suspects that it runs, and nobody else
    setup: EngineConfig | None = None  # with which the engine is handed requests
    turn: int = 0  # number of that setup among those with which anything has arrived
    arrived: bool = False  # whether anything has with this one
    coming: deque[Video] = field(default_factory=deque)
    queue: deque[PlannedRequest] = field(default_factory=deque)
    held: dict[str, tuple[PlannedRequest, EngineConfig]] = field(default_factory=dict)
    decoding: int = 0  # requests whose video decodes for this lane

    @property
    def up(self) -> bool:
        return self.results is not None

    @property
    def ahead(self) -> int:
        """Requests on their way into the lane or in it."""
        return self.decoding + len(self.queue) + len(self.held)

    @property
    def room(self) -> int:
        """Requests that the engine may still be handed."""
        return max(0, HELD * self.slots - len(self.held)) if self.up else 0

    def fitting(self, setup: EngineConfig) -> EngineConfig:
        """The same in the slots that there are."""
        return replace(setup, max_num_seqs=min(setup.max_num_seqs, self.slots))

    def moved(self) -> None:
        """The engine gave a sign of life."""
        self.alive = time.monotonic()

    def lost(self) -> list[PlannedRequest]:
        """Forgets the engine, and what was asked of it; returns what it held, in the order in which
        it was handed."""
        held = [request for request, _ in self.held.values()]
        self.held = {}
        self.engine = self.node = self.results = self.beat = self.trial = self.setup = None
        self.ready = []
        self.others = []
        self.pulse = -1
        self.answered = 0
        self.turn = 0
        self.retires = self.arrived = False
        return held
