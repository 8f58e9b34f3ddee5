"""What stands for the engine, the decoder and the plan where the driver itself is looked at: work that takes a given
time and computes nothing. An engine does what a prompt says: `kill` ends its process, `hang` stops it for good."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.frames import Limits
from pipeline.types import FramePlan, Frames, Item, Planned, VideoInfo, Wave
from std_core.types import Counters, Draft, Mode, Request, Result

IDLE = 0.005  # s between two looks for a request


@dataclass
class StubEngine:
    """Answers the oldest request in its slots every `seconds`; `memory` is how many requests fit in it."""

    max_num_seqs: int
    seconds: float
    memory: int
    counters: Counters = field(default_factory=Counters)

    def run(self, requests: Iterable[Request | None], draft: Draft | None, mode: Mode) -> Iterator[Result]:
        """A text that names the request and the process."""
        rows: deque[Request] = deque()
        for request in requests:
            if request is not None:
                self._admit(request, rows)
            if rows and (request is None or len(rows) == self.max_num_seqs):
                time.sleep(self.seconds)
                self.counters.rounds += 1
                name = rows.popleft().request_id
                yield Result(name, [1], f"{name} by {os.getpid()}", "stop", rounds=1, decode_s=self.seconds)
            elif not rows:
                time.sleep(IDLE)

    def _admit(self, request: Request, rows: deque[Request]) -> None:
        rows.append(request)
        if len(rows) > self.memory:
            raise torch.OutOfMemoryError(f"{len(rows)} requests where {self.memory} fit")
        if request.prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt == "hang":
            time.sleep(1e6)


def load_stub(
    path: str, *, max_num_seqs: int, seconds: float = 0.0, memory: int = 1 << 30, **settings: object
) -> StubEngine:
    """As `Engine.load`; what is the model's is not looked at."""
    return StubEngine(max_num_seqs, seconds, memory)


def decode_stub(uri: str, info: VideoInfo, plan: FramePlan, limits: Limits, seconds: float = 0.0) -> Frames:
    """As `pipeline.frames.decode`: black frames after a while."""
    time.sleep(seconds)
    pixels = np.zeros((len(plan.times), plan.height, plan.width, 3), np.uint8)
    return Frames(pixels, plan.times, plan.fps, 0, 0, "stub")


def planned(number: int, prompt: str = "?", video: str = "", frames: int = 4) -> Planned:
    """A request about a video of its own, unless it is named, of `frames` frames of 56 × 56."""
    uri = video or f"/stub/{number}.mp4"
    info = VideoInfo(uri, 1, "1", "mp4", "h264", 1.0, 0.0, frames, True, 8.0, 56, 56, 0)
    times = tuple(i / 8 for i in range(frames))
    return Planned(f"{number:032x}", Item(uri, prompt), info, FramePlan(times, 56, 56, 8.0, 4 * frames), 4 * frames + 8)


class Listed:
    """Waves that are all there from the start."""

    def __init__(self, requests: Iterable[Planned], max_num_seqs: int, size: int = 64):
        every = list(requests)
        self._waves = deque(Wave(tuple(every[i : i + size]), max_num_seqs) for i in range(0, len(every), size))

    @property
    def closed(self) -> bool:
        """Whether all were taken."""
        return not self._waves

    def take(self) -> Wave | None:
        """The next one."""
        return self._waves.popleft() if self._waves else None
