"""The driver's interfaces: the source of waves, and the backend that runs engines and decode tasks.

A *future* is the backend's handle of a value that may not exist yet. `Backend.wait` returns the
futures that are ready, `Backend.get` the value of one; otherwise a future is opaque to the driver.
With Ray, a future is an object reference. An *engine handle* is opaque in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pipeline.records import EngineConfig, FramePlan, VideoInfo, Wave
from std_core.cost_model.profile import Device
from std_core.types import Request, Result

Future: TypeAlias = Any
EngineHandle: TypeAlias = Any

# codes of `WorkerLost` that are no error codes of rows
PROCESS_CRASHED = "crashed"
OBJECT_LOST = "lost"


class WorkerLost(Exception):
    """A future failed: the worker that computes it, or the value itself, was lost.

    Args:
        code: an error code of the output contract, `PROCESS_CRASHED` if the worker process died, or
            `OBJECT_LOST` if the value was lost together with its machine.
        reason: a clause for error messages.
    """

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason

    @property
    def decode_error_code(self) -> str:
        """The error code of rows whose decode task was lost."""
        codes = {
            "worker_killed": "decode_error",
            OBJECT_LOST: "decode_crashed",
            PROCESS_CRASHED: "decode_crashed",
        }
        return codes.get(self.code, self.code)

    @property
    def engine_error_code(self) -> str:
        """The error code of a row whose request ended its engine."""
        codes = {OBJECT_LOST: "worker_killed", PROCESS_CRASHED: "worker_killed"}
        return codes.get(self.code, self.code)


class WaveSource(Protocol):
    """Where the driver gets waves from, one at a time."""

    def begin(self, device: Device, engines: int) -> None:
        """Set the device and the number of engines, before the first `take`.

        Raises:
            UsageError: the job does not fit the device.
        """

    @property
    def closed(self) -> bool:
        """Whether all waves were taken and no more will come."""

    def take(self, engine_idle: bool) -> Wave | None:
        """Return the next wave, or None if there is none yet.

        Args:
            engine_idle: an engine has no work until this returns a wave, so a small wave is better
                than none.
        """

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """Report that all requests of a wave are completed.

        Args:
            results: of those requests that ran with the wave's own engine config.
        """

    def limit_slots(self, slots: int) -> None:
        """Plan later waves with at most so many slots."""


@dataclass(frozen=True)
class DecodeCall:
    """The two futures of a decode task.

    Args:
        frames: resolves to `Frames` without pixels, or to a RequestError.
        pixels: resolves to (T, height, width, 3) uint8. The driver passes this future on and never
            fetches its value.
    """

    frames: Future
    pixels: Future


@dataclass(frozen=True)
class EngineStart:
    """An engine that is starting.

    Args:
        handle: names the engine in all other calls.
        ready: one future per rank. The engine can run when all are resolved; the first one
            resolves to the id of the engine's node.
    """

    handle: EngineHandle
    ready: list[Future]


@dataclass(frozen=True)
class EngineStreams:
    """What a running engine returns.

    Args:
        results: stream of results, in `Backend.wait` a future that is ready while
            `Backend.next_result` would not block.
        other_ranks: futures that resolve only when one of the other ranks ends.
    """

    results: Any
    other_ranks: list[Future]


@dataclass(frozen=True)
class FeedBatch:
    """Requests with the same decoded frames, for one call of `Backend.feed`.

    Args:
        requests: without their frames.
        pixels: future of the decoded frames.
        pixel_indices: for each request the indices of its own frames in `pixels`.
        config: how the engine decodes the requests.
        config_index: index of `config` among those of this engine, from 0. Before a batch with a
            higher index is sent, all batches with the previous one must have arrived.
    """

    requests: list[Request]
    pixels: Future
    pixel_indices: list[tuple[int, ...]]
    config: EngineConfig
    config_index: int


class Backend(Protocol):
    """Starts engines and decode tasks and waits for their results."""

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> DecodeCall:
        """Start to decode a video, preferably on the given node."""

    def start(self, slots: int) -> EngineStart:
        """Start an engine. `get` of a ready future raises RunError if it cannot start."""

    def run(self, engine: EngineHandle) -> EngineStreams:
        """Let an engine run that is ready."""

    def feed(self, engine: EngineHandle, batch: FeedBatch) -> Future:
        """Send requests to an engine; the future resolves when they have arrived."""

    def heartbeat(self, engine: EngineHandle) -> Future:
        """Request the progress counter, an int that changes as long as the engine works."""

    def wait(self, futures: list[Future], seconds: float) -> list[Future]:
        """Return those futures that are ready; block until the first is, at most `seconds`."""

    def get(self, future: Future) -> Any:
        """Return the value of a future that is ready.

        Raises:
            WorkerLost: it failed.
        """

    def next_result(self, results: Any) -> Result:
        """Return the next result of an engine's stream that is ready.

        Raises:
            WorkerLost: the engine is lost.
        """

    def kill(self, engine: EngineHandle) -> None:
        """Kill all processes of an engine at once."""

    def cancel(self, decode: Future) -> None:
        """Kill a decode task, given its `DecodeCall.frames`."""

    def describe_resources(self) -> str:
        """Describe free and requested resources, for error messages."""
