"""What runs elsewhere: the engine's actor and the decode task, thin shells around `std_core.engine` and
`pipeline.frames`. A request's failure comes back as a value, never as an exception."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from pipeline.config import model_path
from pipeline.frames import Limits
from pipeline.types import FramePlan, Frames, RequestError, VideoInfo
from std_core.types import Draft, Mode, Request, Result

NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)
DECODES = 500  # videos that a process decodes before another takes its place: what leaks is given back

Load = Callable[..., Any]  # (path, **settings) → an engine: something like `std_core.engine.Engine`
Decode = Callable[[str, VideoInfo, FramePlan, Limits], Frames]


@ray.remote(num_cpus=1, num_returns=2, max_retries=0, max_calls=DECODES)
def decode_video(
    decode: Decode, info: VideoInfo, plan: FramePlan, deadline: float
) -> tuple[Frames | RequestError, np.ndarray]:
    """What is known of a video's frames, small enough for the driver, and its pixels for the engine alone."""
    try:
        frames = decode(info.uri, info, plan, Limits(deadline=deadline))
    except RequestError as error:
        return error, NO_PIXELS
    return replace(frames, pixels=NO_PIXELS), frames.pixels


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"feed": 1, "watch": 1})  # type: ignore[call-overload]
class EngineActor:
    """One engine, and the line of requests in front of it, which is fed while the engine runs.

    Args:
        load: makes the engine of a path and settings.
        model: as `--model` has it; presets are looked up where the actor runs.
        settings: the other arguments of `load`.
    """

    def __init__(self, load: Load, model: str, settings: dict[str, Any]):
        # frames lie in the object store's shared memory, read-only; nobody writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.engine = load(model_path(model), **settings)
        self.fed: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.passed = 0  # requests and results that came by

    def ready(self) -> str:
        """The machine that it runs on."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="watch")
    def pulse(self) -> int:
        """A number that another one follows for as long as the engine moves."""
        counters = self.engine.counters
        return self.passed + counters.vision_passes + counters.chunks + counters.rounds

    @ray.method(concurrency_group="feed")
    def feed(self, requests: list[Request], pixels: np.ndarray) -> None:
        """Appends requests that share the frames `pixels`, (T, height, width, 3) uint8."""
        frames = torch.from_numpy(pixels)
        for request in requests:
            self.fed.put(replace(request, frames=frames))

    def run(self, draft: Draft | None, mode: Mode) -> Iterator[Result]:
        """Results as rows finish, for as long as the actor lives. Raises RequestError `out_of_memory`."""
        if draft is not None and draft.model:
            draft = replace(draft, model=model_path(draft.model))  # where this process has it
        try:
            for result in self.engine.run(self._line(), draft, mode=mode):
                self.passed += 1
                yield result
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RequestError("out_of_memory", f"the engine ran out of memory: {error}") from error

    def _line(self) -> Iterator[Request | None]:
        """What is in line; None while nothing is, so that the engine's rows go on meanwhile (the driver may be waiting
        for one of them to free memory)."""
        while True:
            try:
                request = self.fed.get_nowait()
            except queue.Empty:
                yield None
                continue
            self.passed += 1
            yield request
