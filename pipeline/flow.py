"""What is where in a run: videos that decode, requests that wait for an engine or sit in one. Bookkeeping alone: knows
no Ray and starts nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.suspects import Group
from pipeline.types import Frames, Planned, Wave

HELD = 2  # × slots requests that an engine is handed: those in its slots, and as many in line
AHEAD = 3  # × slots requests that are in an engine, decoded for it, or decoding: 2 × slots ahead of the slots


@dataclass(eq=False)
class Video:
    """Requests that share frames, from the plan until the last of them is answered."""

    requests: list[Planned]
    left: int
    nbytes: int  # of its frames as planned
    pixels: Any = None  # reference to them, until the last request is answered
    frames: Frames | None = None  # what is known of them, without pixels
    tries: int = 0  # how often it was decoded
    crashes: int = 0  # how often that ended its process


def videos(wave: Wave) -> Iterator[Video]:
    """The wave's requests by video, in its order."""
    groups: dict[str, list[Planned]] = {}
    for request in wave.requests:
        groups.setdefault(request.info.uri, []).append(request)
    for requests in groups.values():
        sample = requests[0].plan
        yield Video(requests, len(requests), len(sample.times) * sample.height * sample.width * 3)


@dataclass(eq=False)
class Lane:
    """The place of one engine, which outlives the engines that follow each other in it: decoded requests in `queue`
    wait for it, those in `held` were handed to it, in that order, and are not answered yet."""

    number: int
    slots: int
    engine: Any = None
    ready: Any = None  # reference that resolves to the engine's node once it runs; None from then on
    node: str | None = None
    results: Any = None  # its stream, once it runs
    beat: Any = None  # reference to the newest answer to "how far are you"
    pulse: int = -1  # that answer
    alive: float = field(default_factory=time.monotonic)  # when the engine last moved
    asked: float = 0.0  # when it was asked how far it is
    answered: int = 0  # requests, by the engine that runs now
    trial: Group | None = None  # suspects that it runs, and nobody else
    queue: deque[Planned] = field(default_factory=deque)
    held: dict[str, Planned] = field(default_factory=dict)
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

    def moved(self) -> None:
        """The engine gave a sign of life."""
        self.alive = time.monotonic()

    def lost(self) -> list[Planned]:
        """Forgets the engine, and what was asked of it; returns what it held, in the order in which it was handed."""
        held, self.held = list(self.held.values()), {}
        self.engine = self.ready = self.node = self.results = self.beat = self.trial = None
        self.pulse, self.answered = -1, 0
        return held


@dataclass(frozen=True)
class Status:
    """A run at one moment."""

    seconds: float  # since the engines were asked for
    answered: int
    failed: int  # of these
    tokens: int  # written, of the requests answered
    decoding: int  # videos
    waiting: int  # requests that are decoded and wait for an engine
    held: int  # requests that engines hold
    engines: int  # that run
    starting: int  # that were asked for and don't run yet
    deaths: int  # of engines
    suspects: int  # requests that wait to run again because their engine died
    nbytes: int  # of frames that are decoding or held
    most_nbytes: int  # that there were at any moment
    bound: int  # of these bytes

    def line(self) -> str:
        """For a log."""
        where = [
            (self.decoding, "videos decoding"),
            (self.waiting, "requests waiting for an engine to start" if not self.engines else "requests decoded"),
            (self.held, "requests in the engine" if self.engines < 2 else f"requests in {self.engines} engines"),
            (self.suspects, "requests to run again, whose engine died"),
        ]
        places = ", ".join(f"{count} {what}" for count, what in where if count) or "nothing left"
        return f"[{self.seconds:.0f} s] {self.answered} answered; {places}; {self.nbytes / 1e6:.0f} MB of frames"
