"""Stand-ins for the engine, the decoder and the planner in tests and benchmarks of the driver.

They take a given time and compute nothing. A prompt can make the engine fail: `kill` kills its
process, `hang` blocks it for ever.
"""

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

POLL_SECONDS = 0.005  # between two checks for a request
FRAME_SIDE = 56  # pixels, of the frames of `stub_request`


@dataclass
class StubEngine:
    """Completes the oldest request in its slots every `seconds`.

    Args:
        memory: rows above which it runs out of memory.
        first_request_file: path of a file that is created when the first request arrives, unless it
            exists already.
    """

    max_num_seqs: int
    seconds: float
    memory: int
    first_request_file: str = ""
    counters: Counters = field(default_factory=Counters)

    def run(
        self, requests: Iterable[Request | GammaSchedule | None], draft: Draft | None, mode: Mode
    ) -> Iterator[Result]:
        """Yield results as `std_core.engine.engine.Engine.run` does.

        Their texts are `<request id> <γ>×<slots> by <process id>`.
        """
        rows: deque[Request] = deque()
        for request in requests:
            if isinstance(request, Request):
                self._admit(request, rows)
            if rows and (request is None or len(rows) == self.max_num_seqs):
                yield self._complete(rows.popleft(), draft)
            elif not rows:
                time.sleep(POLL_SECONDS)
        for row in rows:
            yield self._complete(row, draft)

    def resize(self, max_num_seqs: int) -> None:
        """Change the number of slots."""
        self.max_num_seqs = max_num_seqs

    def _admit(self, request: Request, rows: deque[Request]) -> None:
        rows.append(request)
        if self.first_request_file and not Path(self.first_request_file).exists():
            Path(self.first_request_file).touch()
        self.first_request_file = ""
        if len(rows) > self.memory:
            raise MemoryError(f"{len(rows)} rows where {self.memory} fit")
        if request.prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt == "hang":
            time.sleep(1e6)

    def _complete(self, request: Request, draft: Draft | None) -> Result:
        time.sleep(self.seconds)
        self.counters.rounds += 1
        gamma = draft.gamma if draft else 0
        return Result(
            request.request_id,
            token_ids=[1],
            text=f"{request.request_id} {gamma}×{self.max_num_seqs} by {os.getpid()}",
            finish_reason="stop",
            rounds=1,
            decode_s=self.seconds,
        )


def load_stub_engine(
    path: str,
    *,
    max_num_seqs: int,
    seconds: float = 0.0,
    memory: int = 1 << 30,
    first_request_file: str = "",
    **settings: object,
) -> StubEngine:
    """Replace `Engine.load`; the settings of a real model are ignored."""
    return StubEngine(max_num_seqs, seconds, memory, first_request_file)


def decode_stub_video(
    uri: str, info: VideoInfo, plan: FramePlan, limits: Limits, seconds: float = 0.0
) -> Frames:
    """Replace `pipeline.video.frames.decode`: return black frames after `seconds`."""
    time.sleep(seconds)
    pixels = np.zeros((len(plan.times), plan.height, plan.width, 3), np.uint8)
    return Frames(pixels, pts=plan.times, fps=plan.fps, frames_lost=0, rotation=0, decoder="stub")


def write_stub_video(path: Path, frames: int = 8) -> None:
    """Write a second of grey, for code that reads headers."""
    image = np.full((64, 64, 3), 128, np.uint8)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=frames)
        stream.width = 64
        stream.height = 64
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())


def stub_request(
    number: int, prompt: str = "?", video: str = "", frames: int = 4
) -> PlannedRequest:
    """A request for `frames` frames of 56 × 56 pixels.

    Args:
        number: gives the request's id and, without `video`, the name of a video of its own.
    """
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
        height=FRAME_SIDE,
        width=FRAME_SIDE,
        rotation=0,
    )
    plan = FramePlan(
        times=tuple(i / 8 for i in range(frames)),
        height=FRAME_SIDE,
        width=FRAME_SIDE,
        fps=8.0,
        tokens=4 * frames,
    )
    return PlannedRequest(
        f"{number:032x}",
        input_row=InputRow(uri, prompt),
        info=info,
        frame_plan=plan,
        context=plan.tokens + 8,
    )


class FixedWaves:
    """A `pipeline.driver.backend.WaveSource` whose waves all exist from the start.

    Attributes:
        waves: not taken yet.
        completed: with the results that were reported, in the order of completion.
    """

    def __init__(self, requests: Iterable[PlannedRequest], max_num_seqs: int, size: int = 64):
        every = tuple(requests)
        self.waves = deque(
            Wave(every[start : start + size], max_num_seqs) for start in range(0, len(every), size)
        )
        self.completed: list[tuple[Wave, list[Result]]] = []

    @property
    def closed(self) -> bool:
        """See `WaveSource`."""
        return not self.waves

    def begin(self, device: Device, engines: int) -> None:
        """See `WaveSource`; the waves are the same on every device."""

    def take(self, engine_idle: bool) -> Wave | None:
        """See `WaveSource`."""
        return self.waves.popleft() if self.waves else None

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """See `WaveSource`."""
        self.completed.append((wave, list(results)))

    def limit_slots(self, slots: int) -> None:
        """See `WaveSource`."""
        self.waves = deque(
            replace(wave, max_num_seqs=min(slots, wave.max_num_seqs)) for wave in self.waves
        )
