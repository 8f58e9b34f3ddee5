"""What runs elsewhere: an engine's actors, thin shells around `std_core.engine.engine`; and how the
driver reaches them, and the decode task."""

from __future__ import annotations

import itertools
import queue
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from pipeline.config import Job, model_path
from pipeline.driver.backend import (
    WorkerLost,
)
from pipeline.driver.decode_task import Decode, decode_video
from pipeline.records import (
    RESUME_HINT,
    EngineConfig,
    FramePlan,
    RequestError,
    RunError,
    VideoInfo,
)
from std_core.cost_model.device_specs import local_device
from std_core.cost_model.profile import Device
from std_core.types import GammaSchedule, Mode, Request, Result

IDLE = 0.005  # s between two looks for a turn

EngineLoader = Callable[
    ..., Any
]  # (path, **settings) → an engine: something like `std_core.engine.engine.Engine`


def load_engine(path: str, **settings: Any) -> Any:
    """`std_core.engine.engine.Engine.load`, imported where it runs: drivers do without PyTorch."""
    from std_core.engine.engine import Engine

    return Engine.load(path, **settings)


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"feed": 1, "watch": 1})  # type: ignore[call-overload]
class EngineActor:
    """One engine, and the lines of requests in front of it, one per turn, which are fed while the
    engine runs.

    Args:
        load: makes the engine of a path and settings.
        model: as `--model` has it; presets are looked up where the actor runs.
        settings: the other arguments of `load`.
        address: where the ranks of an engine find each other, if it has several.
    """

    def __init__(self, load: EngineLoader, model: str, settings: dict[str, Any], address: str = ""):
        # frames lie in the object store's shared memory, read-only; nobody writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.engine = load(model_path(model), address=address, **settings)
        self.lines: dict[int, queue.SimpleQueue[Request | GammaSchedule]] = {}
        self.setups: dict[int, EngineConfig] = {}
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
    def feed(
        self,
        requests: list[Request],
        pixels: np.ndarray,
        numbers: list[tuple[int, ...]],
        turn: int,
        setup: EngineConfig,
    ) -> None:
        """Appends requests to a turn's line, each with those of the frames `pixels`, (T, height,
        width, 3) uint8, that are its own; before them the wave's gamma schedule, if
        any."""
        import torch  # the engine's process has it

        frames = torch.from_numpy(pixels)
        line = self.lines.setdefault(turn, queue.SimpleQueue())
        if setup.gamma_schedule is not None:
            line.put(setup.gamma_schedule)
        for request, own in zip(requests, numbers, strict=True):
            line.put(
                replace(request, frames=frames if len(own) == len(frames) else frames[list(own)])
            )
        self.setups[turn] = setup

    def run(self, mode: Mode, leads: bool = True) -> Iterator[Result]:
        """Results as rows finish, turn by turn, for as long as the actor lives.

        Args: leads: decides when a turn is over: once its line is empty and the next one has begun.
            Other ranks are told.

        Raises:
            RequestError: `out_of_memory`.
        """
        import torch

        try:
            for turn in itertools.count():
                for result in self._turn(turn, mode, leads):
                    self.passed += 1
                    yield result
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RequestError("out_of_memory", f"the engine ran out of memory: {error}") from error

    def _turn(self, turn: int, mode: Mode, leads: bool) -> Iterator[Result]:
        while turn not in self.setups:
            time.sleep(IDLE)
        setup = self.setups.pop(turn)
        draft = setup.draft
        if draft is not None and draft.model:
            draft = replace(draft, model=model_path(draft.model))  # where this process has it
        self.engine.resize(setup.max_num_seqs)
        yield from self.engine.run(self._line(turn, leads), draft, mode=mode)
        del self.lines[turn]

    def follow(self, mode: Mode) -> None:
        """Goes through what `run` of rank 0 goes through, for its share of the work."""
        for _ in self.run(mode, leads=False):
            pass

    def _line(self, turn: int, leads: bool) -> Iterator[Request | GammaSchedule | None]:
        """What is in line; None while nothing is, so that the engine's rows go on meanwhile (the
        driver may be waiting for one of them to free memory)."""
        line = self.lines[turn]
        while True:
            over = (
                leads and turn + 1 in self.lines
            )  # looked at first: what comes in between is taken
            try:
                request = line.get_nowait()
            except queue.Empty:
                if over:
                    return
                yield None
                continue
            self.passed += 1
            yield request


@ray.remote(num_cpus=0)
def free_address() -> str:
    """A port that nobody listens on, on the machine where this runs; its ranks are all there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@ray.remote(num_cpus=0, max_calls=1)
def remote_device() -> Device:
    """The GPU of the machine where this runs."""
    return local_device("cuda")


def device_of(device: str) -> Device:
    """What engines run on: `cpu`, which is taken to be as here, or `cuda`, which is asked where it
    is."""
    if device == "cpu":
        return local_device(device)
    return ray.get(remote_device.options(num_gpus=1).remote())


@dataclass(frozen=True)
class Actors:
    """An engine's actors, one per rank. All are told the same; what rank 0 answers counts."""

    ranks: list[Any]
    place: Any = None  # the resources that several are given at once, on one machine

    @classmethod
    def start(
        cls, load: EngineLoader, model: str, settings: dict[str, Any], options: dict[str, Any]
    ) -> Actors:
        """`settings["tensor_parallel_size"]` actors with the same model; `options`: Ray's, of
        each."""
        new: Any = EngineActor
        if (count := settings["tensor_parallel_size"]) == 1:
            return cls([new.options(**options).remote(load, model, settings)])
        needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
        place = placement_group(
            [{k: v for k, v in needs.items() if v}] * count, strategy="STRICT_PACK"
        )
        seats = [
            PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)
            for rank in range(count)
        ]
        address = free_address.options(scheduling_strategy=seats[0]).remote()
        each = [new.options(**options, scheduling_strategy=seat) for seat in seats]
        return cls(
            [
                a.remote(load, model, settings | {"rank": rank}, address)
                for rank, a in enumerate(each)
            ],
            place,
        )

    def kill(self) -> None:
        """All of them: none can go on without the others."""
        for actor in self.ranks:
            ray.kill(actor)
        if self.place is not None:
            remove_placement_group(self.place)


@dataclass(frozen=True)
class RayBackend:
    """`pipeline.driver.backend.Backend` on a Ray cluster.

    Args:
        load, decoder: make engines and frames.
        options, settings: Ray's for a rank of an engine, and the rank's own but for its slots.
    """

    load: EngineLoader
    decoder: Decode
    job: Job
    options: dict[str, Any]
    settings: dict[str, Any]

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> tuple[Any, Any]:
        task: Any = decode_video
        if node is not None:
            task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
        return tuple(task.remote(self.decoder, info, plan, self.job.decode_timeout))

    def start(self, slots: int) -> tuple[Actors, list[Any]]:
        settings = self.settings | {"max_num_seqs": slots}
        engine = Actors.start(self.load, self.job.model, settings, self.options)
        return engine, [actor.ready.remote() for actor in engine.ranks]

    def run(self, engine: Actors) -> tuple[Any, list[Any]]:
        first, *others = engine.ranks
        return first.run.remote(self.job.mode), [
            actor.follow.remote(self.job.mode) for actor in others
        ]

    def feed(
        self,
        engine: Actors,
        requests: list[Request],
        pixels: Any,
        numbers: list[tuple[int, ...]],
        turn: int,
        setup: EngineConfig,
    ) -> Any:
        first, *_ = [
            actor.feed.remote(requests, pixels, numbers, turn, setup) for actor in engine.ranks
        ]
        return first

    def pulse(self, engine: Actors) -> Any:
        return engine.ranks[0].pulse.remote()

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        if not ray.wait(references, timeout=seconds, fetch_local=False)[0]:
            return []
        return ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]

    def get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as error:
            if "creation task" in str(error):
                raise RunError(
                    f"the engine is gone: it could not start: {_last_line(error)}; {RESUME_HINT}"
                ) from error
            raise WorkerLost(
                "worker_killed", "its process died, killed or out of memory"
            ) from error
        except RayTaskError as error:
            raise _failed(error) from error
        except (WorkerCrashedError, OutOfMemoryError) as error:
            raise WorkerLost(
                "crashed", f"its process died: {str(error).splitlines()[0]}"
            ) from error
        except RayError as error:
            raise WorkerLost("lost", str(error).splitlines()[0]) from error

    def following(self, stream: Any) -> Result:
        try:
            return self.get(next(stream))
        except StopIteration:
            raise WorkerLost("worker_killed", "it ended by itself") from None

    def kill(self, engine: Actors) -> None:
        engine.kill()

    def cancel(self, reference: Any) -> None:
        ray.cancel(reference, force=True)

    def free(self) -> str:
        left = ray.available_resources()
        free = ", ".join(f"{left.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        asked = ", ".join(f"{value:g} {name[4:-1].upper()}" for name, value in self.options.items())
        return f"free in the cluster: {free}; an engine asks for {asked}, a decoder for 1 CPU"


def _failed(error: RayTaskError) -> WorkerLost:
    """What was raised in a task or an actor; a task whose argument could not be had is as if its
    own were lost."""
    if isinstance(error.cause, RequestError):
        return WorkerLost(error.cause.code, error.cause.message)
    return WorkerLost(
        "lost" if isinstance(error.cause, RayError) else "worker_killed", _last_line(error)
    )


def _last_line(error: Exception) -> str:
    """Of a remote traceback: what was raised."""
    return str(error).strip().splitlines()[-1]
