"""What runs elsewhere: the engine's actor and the decode task, thin shells around `std_core.engine` and
`pipeline.frames`. A request's failure comes back as a value, never as an exception."""

from __future__ import annotations

import queue
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
        settings: the other arguments of `Engine.load`.
        address: where the ranks of an engine find each other, if it has several.
    """

    def __init__(self, model: str, settings: dict[str, Any], address: str = ""):
        # frames lie in the object store's shared memory, read-only; nobody writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.engine = Engine.load(model_path(model), address=address, **settings)
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

    def follow(self, draft: Draft | None, mode: Mode) -> None:
        """Goes through what `run` of rank 0 goes through, for its share of the work."""
        for _ in self.run(draft, mode):
            pass

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


@ray.remote(num_cpus=0)
def free_address() -> str:
    """A port that nobody listens on, on the machine where this runs; its ranks are all there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@dataclass(frozen=True)
class Group:
    """An engine's actors, one per rank. All are told the same; what rank 0 answers counts."""

    actors: list[Any]
    place: Any = None  # the resources that several are given at once, on one machine

    @classmethod
    def start(cls, model: str, settings: dict[str, Any], options: dict[str, Any]) -> Group:
        """`settings["tensor_parallel_size"]` actors with the same model; `options`: Ray's, of each."""
        new: Any = EngineActor
        if (ranks := settings["tensor_parallel_size"]) == 1:
            return cls([new.options(**options).remote(model, settings)])
        needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
        place = placement_group([{k: v for k, v in needs.items() if v}] * ranks, strategy="STRICT_PACK")
        seats = [PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank) for rank in range(ranks)]
        address = free_address.options(scheduling_strategy=seats[0]).remote()
        return cls(
            [
                new.options(**options, scheduling_strategy=seat).remote(model, {**settings, "rank": rank}, address)
                for rank, seat in enumerate(seats)
            ],
            place,
        )

    def feed(self, requests: list[Request], pixels: Any, numbers: list[tuple[int, ...]]) -> Any:
        """A reference that is there once rank 0 has the requests."""
        first, *_ = [actor.feed.remote(requests, pixels, numbers) for actor in self.actors]
        return first

    def end(self) -> None:
        for actor in self.actors:
            actor.end.remote()

    def run(self, draft: Draft | None, mode: Mode) -> tuple[Any, list[Any]]:
        """Rank 0's stream of results, and a reference for each other rank, there once it is through or failed."""
        first, *others = self.actors
        return first.run.remote(draft, mode), [actor.follow.remote(draft, mode) for actor in others]

    def kill(self) -> None:
        """All of them: none can go on without the others. Their resources would stay taken for as long as anything
        still names them."""
        for actor in self.actors:
            ray.kill(actor)
        if self.place is not None:
            remove_placement_group(self.place)
