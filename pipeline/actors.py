"""What runs elsewhere: the engine's actor and the decode task, thin shells around `std_core.engine` and
`pipeline.frames`, and how the driver reaches them. A request's failure comes back as a value, never as an exception."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config import Job, model_path
from pipeline.frames import Limits
from pipeline.hands import RESUMES, Gone
from pipeline.types import FramePlan, Frames, RequestError, RunError, VideoInfo
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


@dataclass(frozen=True)
class RayHands:
    """`pipeline.hands.Hands` on a Ray cluster.

    Args:
        load, decode: make engines and frames.
        options, settings: Ray's for an engine, and the engine's own but for its slots.
    """

    load: Load
    decoder: Decode
    job: Job
    draft: Draft | None
    options: dict[str, Any]
    settings: dict[str, Any]

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> tuple[Any, Any]:
        task: Any = decode_video
        if node is not None:
            task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
        return tuple(task.remote(self.decoder, info, plan, self.job.decode_timeout))

    def start(self, slots: int) -> tuple[Any, Any]:
        actor = EngineActor.options(**self.options)  # type: ignore[attr-defined]
        engine = actor.remote(self.load, self.job.model, self.settings | {"max_num_seqs": slots})
        return engine, engine.ready.remote()

    def run(self, engine: Any) -> Any:
        return engine.run.remote(self.draft, self.job.mode)

    def feed(self, engine: Any, requests: list[Request], pixels: Any) -> Any:
        return engine.feed.remote(requests, pixels)

    def pulse(self, engine: Any) -> Any:
        return engine.pulse.remote()

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        if not ray.wait(references, timeout=seconds, fetch_local=False)[0]:
            return []
        return ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]

    def get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as error:
            if "creation task" in str(error):
                raise RunError(f"the engine is gone: it could not start: {_last_line(error)}; {RESUMES}") from error
            raise Gone("worker_killed", "its process died, killed or out of memory") from error
        except RayTaskError as error:
            raise _failed(error) from error
        except (WorkerCrashedError, OutOfMemoryError) as error:
            raise Gone("crashed", f"its process died: {str(error).splitlines()[0]}") from error
        except RayError as error:
            raise Gone("lost", str(error).splitlines()[0]) from error

    def following(self, stream: Any) -> Result:
        try:
            return self.get(next(stream))
        except StopIteration:
            raise Gone("worker_killed", "it ended by itself") from None

    def kill(self, engine: Any) -> None:
        ray.kill(engine)

    def cancel(self, reference: Any) -> None:
        ray.cancel(reference, force=True)

    def free(self) -> str:
        left = ray.available_resources()
        free = ", ".join(f"{left.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        asked = ", ".join(f"{value:g} {name[4:-1].upper()}" for name, value in self.options.items())
        return f"free in the cluster: {free}; an engine asks for {asked}, a decoder for 1 CPU"


def _failed(error: RayTaskError) -> Gone:
    """What was raised in a task or an actor; a task whose argument could not be had is as if its own were lost."""
    if isinstance(error.cause, RequestError):
        return Gone(error.cause.code, error.cause.message)
    return Gone("lost" if isinstance(error.cause, RayError) else "worker_killed", _last_line(error))


def _last_line(error: Exception) -> str:
    """Of a remote traceback: what was raised."""
    return str(error).strip().splitlines()[-1]
