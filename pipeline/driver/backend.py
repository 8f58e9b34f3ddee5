"""What the driver asks of the world around it: waves to run, and hands that reach engines and
decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.records import EngineConfig, FramePlan, VideoInfo, Wave
from std_core.cost_model.profile import Device
from std_core.types import Request, Result


class WorkerLost(Exception):
    """What was waited for will not come. `code` is an error code of rows, `crashed` (its process
    died) or `lost` (what it made was lost with a machine)."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code = code
        self.why = why


class WaveSource(Protocol):
    """Where waves come from, as they are made."""

    def begin(self, device: Device, engines: int) -> None:
        """Says what will run them, before the first is taken. Raises UsageError for what does not
        go with it."""

    @property
    def closed(self) -> bool:
        """Whether all were taken."""

    def take(self, engine_idle: bool) -> Wave | None:
        """The next one, if there is one by now; `engine_idle`: somebody has nothing to do until then."""

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """All of its requests are answered; `results` are of those that ran as the wave says."""

    def limit_slots(self, slots: int) -> None:
        """From now on no wave has more slots than so many."""


class Backend(Protocol):
    """How engines and decoders are reached. A reference names what a call will give; `get` gives
    it, once `wait` says that it is there, or raises Gone."""

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> tuple[Any, Any]:
        """Starts decoding, near a machine if one is given: references to what is known of the
        frames, and to pixels."""

    def start(self, slots: int) -> tuple[Any, list[Any]]:
        """Asks for an engine: a handle of it, and references, the first to the machine that it runs
        on, which all are there once it can run. `get` raises RunError for one that cannot start."""

    def run(self, engine: Any) -> tuple[Any, list[Any]]:
        """Lets it run: a stream of results, of which `following` gives the next, and references of
        which none is there before a part of the engine has failed."""

    def feed(
        self,
        engine: Any,
        requests: list[Request],
        pixels: Any,
        numbers: list[tuple[int, ...]],
        turn: int,
        setup: EngineConfig,
    ) -> Any:
        """Hands it requests, with the numbers that each one's frames have among `pixels`. Every
        `turn`, from 0 on, has a setup, and none may be fed before all that was fed in the turn
        before has arrived."""

    def pulse(self, engine: Any) -> Any:
        """Asks it how far it is."""

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        """Those that are there; waits for the first of them."""

    def get(self, reference: Any) -> Any:
        """What a reference names."""

    def following(self, stream: Any) -> Result:
        """The next result."""

    def kill(self, engine: Any) -> None:
        """Ends an engine's processes, whatever they do."""

    def cancel(self, reference: Any) -> None:
        """Ends what decodes."""

    def free(self) -> str:
        """What the cluster has left, and what an engine asks for, for people."""
