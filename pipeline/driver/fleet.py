"""What the driver does, step by step: videos are decoded a little ahead of the engines, requests
handed over as their frames arrive, results handed on as rows finish, engines that die replaced.
Everything here is in one thread, so that every request is handed on exactly once. Ray is behind
`pipeline.driver.backend.Backend`; here its references are names of things that will come."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import Job
from pipeline.driver.backend import (
    Backend,
    WaveSource,
    WorkerLost,
)
from pipeline.driver.decode_queue import Intake
from pipeline.driver.feeder import Handover
from pipeline.driver.replica import Replica
from pipeline.records import (
    RESUME_HINT,
    CompletedRequest,
    EngineConfig,
    PlannedRequest,
    RequestError,
    RunError,
    RunSnapshot,
)
from std_core.types import Result

logger = logging.getLogger(__name__)

BEAT = 1.0  # s between two questions to an engine how far it is
DRAIN = 20.0  # s that engines may go on after SIGTERM
# requests that an engine answers before another takes its place: what leaks is given back
RECYCLE = 10_000
STARTS = 3  # engines in a row that end before anything is answered, beyond what suspects explain
CODES = {
    "lost": "worker_killed",
    "crashed": "worker_killed",
}  # what a row says of an engine that ended


Emit = Callable[[CompletedRequest], None]


@dataclass
class Fleet:
    """The engines and what is on its way to them: the intake → a lane's `queue` → its `held` →
    answered."""

    job: Job
    waves: WaveSource
    emit: Emit
    tick: Callable[[], None]
    notice: Callable[[RunSnapshot], None]
    backend: Backend
    replicas: list[Replica]
    intake: Intake
    handover: Handover
    answered: int = 0
    deaths: int = 0
    barren: int = 0  # engines that ended without having been handed anything, since the last answer
    blamed: int = 0
    moved: float = field(default_factory=time.monotonic)  # when anything last happened
    looked: float = field(default_factory=time.monotonic)  # when the driver last looked

    # ------------------------------------------------------------------------------------- the loop

    def run(self, stopped: list[int]) -> None:
        """Until every request is answered. Raises RunError; `stopped` gets the numbers of
        signals."""
        for replica in self.replicas:
            self.start(replica)
        while not self.finished:
            if stopped:
                self._drain(stopped)
                raise RunError(f"stopped by {signal.Signals(stopped[0]).name}; {RESUME_HINT}")
            self.admit()
            for replica in self.replicas:
                self._recycle(replica)
                self.handover.feed(replica)
            self.step()
            self.watch()
            self.tick()
            self.notice(self.snapshot)

    def close(self) -> None:
        """Ends what runs; else its resources stay taken for as long as anything here still names
        it."""
        for reference in self.intake.decoding:
            self.backend.cancel(reference)
        for replica in self.replicas:
            if replica.engine is not None:
                self.backend.kill(replica.engine)

    @property
    def finished(self) -> bool:
        return self.intake.finished and not self.handover.open

    def _drain(self, stopped: list[int]) -> None:
        """Lets engines finish what they hold, until a second signal or for a while."""
        ends = time.monotonic() + DRAIN
        count = len(stopped)
        while (
            any(replica.held for replica in self.replicas)
            and time.monotonic() < ends
            and len(stopped) == count
        ):
            self.step()
            self.watch()
            self.tick()

    @property
    def snapshot(self) -> RunSnapshot:
        engines = sum(replica.up for replica in self.replicas)
        return RunSnapshot(
            decoding=len(self.intake.decoding),
            waiting=sum(len(replica.queue) for replica in self.replicas)
            + len(self.handover.returned),
            in_engine=sum(len(replica.held) for replica in self.replicas),
            engines=engines,
            starting=len(self.replicas) - engines,
            deaths=self.deaths,
            suspects=sum(len(group.requests) for group in self.handover.suspects.waiting),
            frame_bytes=self.intake.nbytes,
            peak_frame_bytes=self.intake.most_nbytes,
        )

    # --------------------------------------------------------------------------------- what decodes

    def admit(self) -> None:
        """Starts decoding all that may."""
        while (video := self.intake.admit()) is not None:
            self.handover.open.update(
                {request.request_id: (request, video) for request in video.requests}
            )
            self._happened()

    def _take_frames(self, reference: Any) -> None:
        arrival = self.intake.take(reference)
        self._happened()
        if arrival is None:
            return
        arrival.replica.queue.extend(
            r for r in arrival.requests if r.frames_key not in arrival.failed
        )
        # no request that is not in an engine already can be answered
        held = {name for replica in self.replicas for name in replica.held}
        lost = [r for r in arrival.video.requests if r.frames_key in arrival.failed]
        for request in lost:
            if (name := request.request_id) in self.handover.open and name not in held:
                self.handover.suspects.drop([name])
                self._answer(
                    Result(
                        name,
                        token_ids=[],
                        text="",
                        finish_reason="error",
                        error=arrival.failed[request.frames_key],
                    )
                )

    # ---------------------------------------------------------------------------------- the engines

    def start(self, replica: Replica) -> None:
        """Asks for an engine in the place of the one before."""
        replica.engine, replica.ready = self.backend.start(replica.slots)

    def _recycle(self, replica: Replica) -> None:
        """An engine that has answered very many gets nothing more, and is replaced once it is
        empty."""
        replica.retires = replica.answered >= RECYCLE
        if replica.retires and not replica.held:
            self._replace(replica)

    # ------------------------------------------------------------------------------ what comes back

    def step(self) -> None:
        """Waits, a second at most, for whatever comes first, and takes all there is."""
        of_lanes = [
            r
            for replica in self.replicas
            for r in (*replica.ready, *replica.others, replica.results, replica.beat)
        ]
        references = [
            *self.intake.decoding,
            *self.handover.feeding,
            *(r for r in of_lanes if r is not None),
        ]
        idle = not self.intake.finished and not self.intake.decoding
        for reference in self.backend.wait(references, 0.05 if idle else 1.0):
            self._take(reference)

    def _take(self, reference: Any) -> None:
        if reference in self.intake.decoding:
            self._take_frames(reference)
        elif reference in self.handover.feeding:
            self.handover.take(reference)
        for replica in self.replicas:  # none, if its engine has died a moment ago
            if reference in replica.ready:
                self._take_ready(replica, reference)
            elif reference in replica.others:
                self._take_end(replica, reference)
            elif reference == replica.beat:
                self._take_beat(replica)
            elif reference is replica.results:
                self._take_result(replica)

    def _take_ready(self, replica: Replica, reference: Any) -> None:
        try:
            node = self.backend.get(reference)
        except WorkerLost as gone:
            self._died(replica, gone, " while it started")
            return
        replica.node = replica.node or node
        replica.ready.remove(reference)
        if not replica.ready:
            replica.results, replica.others = self.backend.run(replica.engine)
        replica.moved()
        self._happened()

    def _take_end(self, replica: Replica, reference: Any) -> None:
        """A part of an engine runs for as long as the engine does."""
        try:
            self.backend.get(reference)
        except WorkerLost as gone:
            self._died(replica, gone)
        else:
            self._died(replica, WorkerLost("worker_killed", "a part of it ended by itself"))

    def _take_beat(self, replica: Replica) -> None:
        reference = replica.beat
        replica.beat = None
        try:
            pulse = self.backend.get(reference)
        except WorkerLost:
            return  # its stream tells
        if pulse != replica.pulse:
            replica.pulse = pulse
            replica.moved()
            self._happened()

    def _take_result(self, replica: Replica) -> None:
        try:
            result = self.backend.following(replica.results)
        except WorkerLost as gone:
            self._died(replica, gone)
            return
        replica.moved()
        if (held := replica.held.pop(result.request_id, None)) is not None:
            replica.answered += 1
            self.barren = 0
            self._answer(result, held[1])
        self.handover.end_trial(replica)

    def _answer(self, result: Result, setup: EngineConfig | None = None) -> None:
        request, video = self.handover.open.pop(result.request_id)
        self._happened()
        self.answered += 1
        self.intake.answered(video)
        turn = video.turn
        turn.left -= 1
        if setup == turn.wave.engine_config:
            turn.results.append(result)
        if not turn.left:
            self.waves.complete(turn.wave, turn.results)
        attempts = self.handover.handed.pop(result.request_id, 0) or video.tries
        draft = (setup or turn.wave.engine_config).draft
        self.emit(CompletedRequest(request, video.frames_of(request), result, attempts, draft))

    # ----------------------------------------------------------------------------------- what fails

    def _died(self, replica: Replica, gone: WorkerLost, when: str = "") -> None:
        """An engine is gone: what it held is run again, as suspects, or with half the slots if its
        memory was full."""
        trial = replica.trial
        queue = replica.queue
        setup = replica.setup
        code = CODES.get(gone.code, gone.code)
        why = gone.why + when
        slots = setup.max_num_seqs if setup is not None else replica.slots
        full = code == "out_of_memory" and slots > 1
        if full:
            self._shrink(slots // 2)
            why += f"; from now on {slots // 2} rows at a time"
        held = self._replace(replica)
        names = tuple(request.request_id for request in held)
        self.deaths += 1
        if full and trial is not None and held:
            self.handover.suspects.put_back(replace(trial, requests=names))
        elif full:
            queue.extendleft(reversed(held))
        elif (culprit := self.handover.suspects.died(names, trial)) is not None:
            self._blame(culprit, code, why)
        self.barren = 0 if held else self.barren + 1
        if self.barren >= STARTS:
            raise RunError(
                f"the engine is gone: {why}, {self.barren} times in a row; {RESUME_HINT}"
            )
        self.handover.returned.extend(queue)
        queue.clear()
        logger.warning(
            "engine %d is replaced: %s; %d requests run again", replica.number, why, len(held)
        )

    def _shrink(self, slots: int) -> None:
        """In all engines: what was planned is too much for one of them."""
        self.waves.limit_slots(slots)
        for replica in self.replicas:
            replica.slots = min(replica.slots, slots)

    def _replace(self, replica: Replica) -> list[PlannedRequest]:
        self.backend.kill(replica.engine)
        held = replica.lost()
        self.start(replica)
        return held

    def _blame(self, culprit: str, code: str, why: str) -> None:
        self.blamed += 1
        message = f"an engine that had nobody else ended twice: {why}"
        self._answer(
            Result(
                culprit,
                token_ids=[],
                text="",
                finish_reason="error",
                error=RequestError(code, message),
            )
        )
        if self.blamed >= STARTS and self.blamed == self.answered:
            raise RunError(
                f"each of the first {self.blamed} requests ended its engine: {why}; {RESUME_HINT}"
            )

    def watch(self) -> None:
        """Asks engines how far they are; ends those that don't move; ends the run if nothing
        does."""
        now = time.monotonic()
        if (asleep := now - self.looked) > 5:  # the driver was stopped, or storage kept it waiting
            self.moved += asleep
            for replica in self.replicas:
                replica.alive += asleep
        self.looked = now
        for replica in self.replicas:
            if not replica.up or not replica.held:
                continue
            if now - replica.alive > self.job.engine_timeout:
                self._died(
                    replica,
                    WorkerLost(
                        "engine_timeout", f"it had not moved for {self.job.engine_timeout:g} s"
                    ),
                )
            elif replica.beat is None and now - replica.asked > BEAT:
                replica.asked, replica.beat = now, self.backend.pulse(replica.engine)
        if now - self.moved > self.job.stall_timeout:
            raise RunError(
                f"nothing has moved for {self.job.stall_timeout:g} s: {self._stalled()}; {RESUME_HINT}"
            )

    def _happened(self) -> None:
        self.moved = time.monotonic()

    def _stalled(self) -> str:
        """Which stage waits, and for what."""
        starting = [str(replica.number) for replica in self.replicas if not replica.up]
        stages = [
            (
                self.intake.decoding,
                f"{len(self.intake.decoding)} videos wait for a CPU to decode on",
            ),
            (starting, f"engine {', '.join(starting)} waits for its start"),
            (not self.intake.finished, "the next headers are being read"),
        ]
        return "; ".join(text for waits, text in stages if waits) + f"; {self.backend.free()}"
