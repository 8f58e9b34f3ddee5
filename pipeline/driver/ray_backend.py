"""`pipeline.driver.backend.Backend` on a Ray cluster. Futures are object references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config import Job
from pipeline.driver.backend import (
    OBJECT_LOST,
    PROCESS_CRASHED,
    DecodeCall,
    EngineStart,
    EngineStreams,
    FeedBatch,
    Future,
    WorkerLost,
)
from pipeline.driver.decode_task import Decode, decode_video
from pipeline.driver.engine_actor import EngineActors, EngineLoader
from pipeline.driver.resources import EngineResources
from pipeline.records import RESUME_HINT, FramePlan, RequestError, RunError, VideoInfo
from std_core.cost_model.device_specs import local_device
from std_core.cost_model.profile import Device
from std_core.types import Result


@ray.remote(num_cpus=0, max_calls=1)
def remote_device() -> Device:
    """The GPU of the machine where this runs."""
    return local_device("cuda")


def engine_device(device: str) -> Device:
    """The device that engines run on.

    Args:
        device: `cpu`, which is assumed to equal this machine's, or `cuda`, which is looked up on a
            machine that has one.
    """
    if device == "cpu":
        return local_device(device)
    found: Device = ray.get(remote_device.options(num_gpus=1).remote())
    return found


@dataclass(frozen=True)
class RayBackend:
    """See `pipeline.driver.backend.Backend`.

    Args:
        load: builds engines.
        decoder: decodes videos.
        resources: of the engines.
    """

    job: Job
    load: EngineLoader
    decoder: Decode
    resources: EngineResources

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> DecodeCall:
        task: Any = decode_video
        if node is not None:
            task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
        frames, pixels = task.remote(self.decoder, info, plan, self.job.decode_timeout)
        return DecodeCall(frames, pixels)

    def start(self, slots: int) -> EngineStart:
        settings = self.resources.loader_settings | {"max_num_seqs": slots}
        options = self.resources.actor_options
        engine = EngineActors.start(self.load, self.job.model, settings, options)
        return EngineStart(engine, [actor.ready.remote() for actor in engine.ranks])

    def run(self, engine: EngineActors) -> EngineStreams:
        leader, *followers = engine.ranks
        return EngineStreams(
            results=leader.run.remote(self.job.mode),
            other_ranks=[actor.follow.remote(self.job.mode) for actor in followers],
        )

    def feed(self, engine: EngineActors, batch: FeedBatch) -> Future:
        # `pixels` is an argument of its own, because Ray resolves no references inside of objects
        arrived = [
            actor.feed.remote(
                batch.requests,
                batch.pixels,
                pixel_indices=batch.pixel_indices,
                config_index=batch.config_index,
                config=batch.config,
            )
            for actor in engine.ranks
        ]
        return arrived[0]

    def heartbeat(self, engine: EngineActors) -> Future:
        return engine.ranks[0].heartbeat.remote()

    def wait(self, futures: list[Future], seconds: float) -> list[Future]:
        ready, _ = ray.wait(futures, timeout=seconds, fetch_local=False)
        if not ready:
            return []
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=False)
        found: list[Future] = ready
        return found

    def get(self, future: Future) -> Any:
        try:
            return ray.get(future)
        except RayActorError as error:
            if "creation task" in str(error):
                raise RunError(
                    f"the engine is gone: it could not start: {_last_line(error)}; {RESUME_HINT}"
                ) from error
            reason = "its process died, killed or out of memory"
            raise WorkerLost("worker_killed", reason) from error
        except RayTaskError as error:
            raise _task_failure(error) from error
        except (WorkerCrashedError, OutOfMemoryError) as error:
            reason = f"its process died: {_first_line(error)}"
            raise WorkerLost(PROCESS_CRASHED, reason) from error
        except RayError as error:
            raise WorkerLost(OBJECT_LOST, _first_line(error)) from error

    def next_result(self, results: Any) -> Result:
        try:
            result: Result = self.get(next(results))
        except StopIteration:
            raise WorkerLost("worker_killed", "it ended by itself") from None
        return result

    def kill(self, engine: EngineActors) -> None:
        engine.kill()

    def cancel(self, decode: Future) -> None:
        ray.cancel(decode, force=True)

    def describe_resources(self) -> str:
        available = ray.available_resources()
        free = ", ".join(f"{available.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        requested = ", ".join(
            f"{amount:g} {option.removeprefix('num_').removesuffix('s').upper()}"
            for option, amount in self.resources.actor_options.items()
        )
        return f"free in the cluster: {free}; an engine needs {requested}, a decoder 1 CPU"


def _task_failure(error: RayTaskError) -> WorkerLost:
    """Convert an exception that was raised in a task or an actor."""
    if isinstance(error.cause, RequestError):
        return WorkerLost(error.cause.code, error.cause.message)
    # a RayError inside a task: one of its arguments was lost
    code = OBJECT_LOST if isinstance(error.cause, RayError) else "worker_killed"
    return WorkerLost(code, _last_line(error))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _last_line(error: Exception) -> str:
    """The exception at the end of a remote traceback."""
    return str(error).strip().splitlines()[-1]
