"""What runs elsewhere: the engine's actor and the decode task, thin shells around `std_core.engine` and
`pipeline.frames`. A request's failure comes back as a value, never as an exception."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from pipeline.config import model_path
from pipeline.frames import Limits, decode
from pipeline.types import FramePlan, Frames, RequestError, VideoInfo
from std_core.engine import Engine
from std_core.types import Draft, Mode, Request, Result

NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)


@ray.remote(num_cpus=1, num_returns=2, max_retries=0)
def decode_video(info: VideoInfo, plan: FramePlan, deadline: float) -> tuple[Frames | RequestError, np.ndarray]:
    """What is known of a video's frames, small enough for the driver, and its pixels for the engine alone."""
    try:
        frames = decode(info.uri, info, plan, Limits(deadline=deadline))
    except RequestError as error:
        return error, NO_PIXELS
    return replace(frames, pixels=NO_PIXELS), frames.pixels


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"feed": 1})  # type: ignore[call-overload]
class EngineActor:
    """One engine, and the line of requests in front of it, which is fed while the engine runs.

    Args:
        model: as `--model` has it; presets are looked up where the actor runs.
        settings: the other arguments of `Engine`.
    """

    def __init__(self, model: str, settings: dict[str, Any]):
        # frames lie in the object store's shared memory, read-only; nobody writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.engine = Engine.load(model_path(model), **settings)
        self.fed: queue.SimpleQueue[Request | None] = queue.SimpleQueue()

    @ray.method(concurrency_group="feed")
    def feed(self, requests: list[Request], pixels: np.ndarray, numbers: list[tuple[int, ...]]) -> None:
        """Appends requests, each with those of the frames `pixels`, (T, height, width, 3) uint8, that are its own."""
        frames = torch.from_numpy(pixels)
        for request, own in zip(requests, numbers, strict=True):
            self.fed.put(replace(request, frames=frames if len(own) == len(frames) else frames[list(own)]))

    @ray.method(concurrency_group="feed")
    def end(self) -> None:
        """Nothing more will be fed. To be called once every `feed` has returned: calls may overtake each other."""
        self.fed.put(None)

    def run(self, draft: Draft | None, mode: Mode) -> Iterator[Result]:
        """Results as rows finish, until what was fed before `end` is answered."""
        if draft is not None and draft.model:
            draft = replace(draft, model=model_path(draft.model))  # where this process has it
        yield from self.engine.run(self._line(), draft, mode=mode)

    def _line(self) -> Iterator[Request | None]:
        """What is in line; None while nothing is, so that the engine's rows go on meanwhile (the driver may be waiting
        for one of them to free memory)."""
        while True:
            try:
                request = self.fed.get_nowait()
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            yield request
