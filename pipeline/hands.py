"""What the driver asks of the world around it: waves to run, and hands that reach engines and decoders."""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.types import FramePlan, VideoInfo, Wave
from std_core.types import Request, Result

RESUMES = "what is finished is written, and the same command resumes"


class Gone(Exception):
    """What was waited for will not come. `code` is an error code of rows, `crashed` (its process died) or `lost` (what
    it made was lost with a machine)."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code, self.why = code, why


class Waves(Protocol):
    """Where waves come from, as they are made."""

    @property
    def closed(self) -> bool:
        """Whether all were taken."""

    def take(self) -> Wave | None:
        """The next one, if there is one by now."""


class Hands(Protocol):
    """How engines and decoders are reached. A reference names what a call will give; `get` gives it, once `wait` says
    that it is there, or raises Gone."""

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> tuple[Any, Any]:
        """Starts decoding, near a machine if one is given: references to what is known of the frames, and to pixels."""

    def start(self, slots: int) -> tuple[Any, Any]:
        """Asks for an engine: a handle of it, and a reference to the machine that it runs on. `get` raises RunError
        for one that cannot start."""

    def run(self, engine: Any) -> Any:
        """Lets it run: a stream of results, of which `following` gives the next."""

    def feed(self, engine: Any, requests: list[Request], pixels: Any) -> Any:
        """Hands it requests that share frames."""

    def pulse(self, engine: Any) -> Any:
        """Asks it how far it is."""

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        """Those that are there; waits for the first of them."""

    def get(self, reference: Any) -> Any:
        """What a reference names."""

    def following(self, stream: Any) -> Result:
        """The next result."""

    def kill(self, engine: Any) -> None:
        """Ends an engine's process, whatever it does."""

    def cancel(self, reference: Any) -> None:
        """Ends what decodes."""

    def free(self) -> str:
        """What the cluster has left, and what an engine asks for, for people."""
