"""What stands for the engine, the decoder and the plan where the driver itself is looked at: work
that takes a given time and computes nothing. An engine does what a prompt says: `kill` ends its
process, `hang` stops it for good."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import av
import numpy as np

from pipeline.records import FramePlan, Frames, InputRow, PlannedRequest, VideoInfo, Wave
from pipeline.video.frames import Limits
from std_core.cost_model.profile import Device
from std_core.types import Counters, Draft, GammaSchedule, Mode, Request, Result

IDLE = 0.005  # s between two looks for a request


@dataclass
class StubEngine:
    """Answers the oldest request in its slots every `seconds`; `memory` is how many requests fit in
    it, `begun` a file that is made when the first comes."""

    max_num_seqs: int
    seconds: float
    memory: int
    begun: str = ""
    counters: Counters = field(default_factory=Counters)

    def run(
        self, requests: Iterable[Request | GammaSchedule | None], draft: Draft | None, mode: Mode
    ) -> Iterator[Result]:
        """A text that names the request, γ × slots, and the process."""
        rows: deque[Request] = deque()
        for request in requests:
            if isinstance(request, Request):
                self._admit(request, rows)
            if rows and (request is None or len(rows) == self.max_num_seqs):
                yield self._answer(rows.popleft(), draft)
            elif not rows:
                time.sleep(IDLE)
        for request in rows:
            yield self._answer(request, draft)

    def _answer(self, request: Request, draft: Draft | None) -> Result:
        time.sleep(self.seconds)
        self.counters.rounds += 1
        told = f"{request.request_id} {draft.gamma if draft else 0}×{self.max_num_seqs} by {os.getpid()}"
        return Result(
            request.request_id,
            token_ids=[1],
            text=told,
            finish_reason="stop",
            rounds=1,
            decode_s=self.seconds,
        )

    def resize(self, max_num_seqs: int) -> None:
        """As an engine does it."""
        self.max_num_seqs = max_num_seqs

    def _admit(self, request: Request, rows: deque[Request]) -> None:
        rows.append(request)
        if self.begun and not Path(self.begun).exists():  # nor has an engine before this one
            Path(self.begun).touch()
        self.begun = ""
        if len(rows) > self.memory:
            raise MemoryError(f"{len(rows)} requests where {self.memory} fit")
        if request.prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt == "hang":
            time.sleep(1e6)


def load_stub_engine(
    path: str,
    *,
    max_num_seqs: int,
    seconds: float = 0.0,
    memory: int = 1 << 30,
    begun: str = "",
    **settings: object,
) -> StubEngine:
    """As `Engine.load`; what is the model's is not looked at."""
    return StubEngine(max_num_seqs, seconds, memory, begun)


def decode_stub_video(
    uri: str, info: VideoInfo, plan: FramePlan, limits: Limits, seconds: float = 0.0
) -> Frames:
    """As `pipeline.video.frames.decode`: black frames after a while."""
    time.sleep(seconds)
    pixels = np.zeros((len(plan.times), plan.height, plan.width, 3), np.uint8)
    return Frames(pixels, pts=plan.times, fps=plan.fps, frames_lost=0, rotation=0, decoder="stub")


def write_stub_video(path: Path, frames: int = 8) -> None:
    """A second of grey, which only headers are read of."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=frames)
        stream.width = stream.height = 64
        for _ in range(frames):
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.full((64, 64, 3), 128, np.uint8), "rgb24")
                )
            )
        container.mux(stream.encode())


def stub_request(
    number: int, prompt: str = "?", video: str = "", frames: int = 4
) -> PlannedRequest:
    """A request about a video of its own, unless it is named, of `frames` frames of 56 × 56."""
    uri = video or f"/stub/{number}.mp4"
    info = VideoInfo(
        uri,
        size_bytes=1,
        version="1",
        container="mp4",
        codec="h264",
        duration=1.0,
        start=0.0,
        frames=frames,
        exact=True,
        fps=8.0,
        height=56,
        width=56,
        rotation=0,
    )
    times = tuple(i / 8 for i in range(frames))
    return PlannedRequest(
        f"{number:032x}",
        input_row=InputRow(uri, prompt),
        info=info,
        frame_plan=FramePlan(times, height=56, width=56, fps=8.0, tokens=4 * frames),
        context=4 * frames + 8,
    )


class FixedWaves:
    """Waves that are all there from the start."""

    def __init__(self, requests: Iterable[PlannedRequest], max_num_seqs: int, size: int = 64):
        every = list(requests)
        self.waves = deque(
            Wave(tuple(every[i : i + size]), max_num_seqs) for i in range(0, len(every), size)
        )

        self.answered: list[tuple[Wave, list[Result]]] = []

    def begin(self, device: Device, engines: int) -> None:
        """It makes no difference."""

    @property
    def closed(self) -> bool:
        """Whether all were taken."""
        return not self.waves

    def take(self, engine_idle: bool) -> Wave | None:
        """The next one."""
        return self.waves.popleft() if self.waves else None

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """Notes it."""
        self.answered.append((wave, list(results)))

    def limit_slots(self, slots: int) -> None:
        """Of all that are left."""
        self.waves = deque(
            replace(wave, max_num_seqs=min(slots, wave.max_num_seqs)) for wave in self.waves
        )
