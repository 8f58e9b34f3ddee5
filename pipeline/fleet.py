"""What the driver does, step by step: videos are decoded a little ahead of the engines, requests handed over as their
frames arrive, results handed on as rows finish, engines that die replaced. Everything here is in one thread, so that
every request is handed on exactly once. Ray is behind `pipeline.hands.Hands`; here its references are names of things
that will come."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import Job
from pipeline.flow import Flow, Lane, Video
from pipeline.hands import RESUMES, Gone, Hands, Waves
from pipeline.intake import Intake
from pipeline.suspects import Group, Suspects
from pipeline.types import Answer, Frames, Planned, RequestError, RunError, Setup
from std_core.types import Request, Result

BEAT = 1.0  # s between two questions to an engine how far it is
DRAIN = 20.0  # s that engines may go on after SIGTERM
RECYCLE = 10_000  # requests that an engine answers before another takes its place: what leaks is given back
STARTS = 3  # engines in a row that end before anything is answered, beyond what suspects explain
CODES = {"lost": "worker_killed", "crashed": "worker_killed"}  # what a row says of an engine that ended


Emit = Callable[[Answer], None]


@dataclass
class Fleet:
    """The engines and what is on its way to them: the intake → a lane's `queue` → its `held` → answered."""

    job: Job
    waves: Waves
    max_model_len: int
    emit: Emit
    tick: Callable[[], None]
    notice: Callable[[Flow], None]
    hands: Hands
    lanes: list[Lane]
    intake: Intake
    open: dict[str, tuple[Planned, Video]] = field(default_factory=dict)  # all requests between plan and answer
    feeding: dict[Any, tuple[Lane, Any, list[Planned], Any]] = field(default_factory=dict)
    returned: deque[Planned] = field(default_factory=deque)  # decoded for a lane whose engine died
    suspects: Suspects = field(default_factory=Suspects)
    handed: Counter[str] = field(default_factory=Counter)  # id → engines that were handed the request
    answered: int = 0
    deaths: int = 0
    barren: int = 0  # engines that ended without having been handed anything, since the last answer
    blamed: int = 0
    moved: float = field(default_factory=time.monotonic)  # when anything last happened
    looked: float = field(default_factory=time.monotonic)  # when the driver last looked

    # ---------------------------------------------------------------------------------------------------- the loop

    def run(self, stopped: list[int]) -> None:
        """Until every request is answered. Raises RunError; `stopped` gets the numbers of signals."""
        for lane in self.lanes:
            self.start(lane)
        while not self.finished:
            if stopped:
                self._drain(stopped)
                raise RunError(f"stopped by {signal.Signals(stopped[0]).name}; {RESUMES}")
            self.admit()
            for lane in self.lanes:
                self.feed(lane)
            self.step()
            self.watch()
            self.tick()
            self.notice(self.flow)

    def close(self) -> None:
        """Ends what runs; else its resources stay taken for as long as anything here still names it."""
        for reference in self.intake.decoding:
            self.hands.cancel(reference)
        for lane in self.lanes:
            if lane.engine is not None:
                self.hands.kill(lane.engine)

    @property
    def finished(self) -> bool:
        return self.intake.finished and not self.open

    def _drain(self, stopped: list[int]) -> None:
        """Lets engines finish what they hold, until a second signal or for a while."""
        ends, count = time.monotonic() + DRAIN, len(stopped)
        while any(lane.held for lane in self.lanes) and time.monotonic() < ends and len(stopped) == count:
            self.step()
            self.watch()
            self.tick()

    @property
    def flow(self) -> Flow:
        engines = sum(lane.up for lane in self.lanes)
        return Flow(
            decoding=len(self.intake.decoding),
            waiting=sum(len(lane.queue) for lane in self.lanes) + len(self.returned),
            held=sum(len(lane.held) for lane in self.lanes),
            engines=engines,
            starting=len(self.lanes) - engines,
            deaths=self.deaths,
            suspects=sum(len(group.requests) for group in self.suspects.waiting),
            nbytes=self.intake.nbytes,
            most_nbytes=self.intake.most_nbytes,
        )

    # ------------------------------------------------------------------------------------------------- what decodes

    def admit(self) -> None:
        """Starts decoding all that may."""
        while (video := self.intake.admit()) is not None:
            self.open.update({request.request_id: (request, video) for request in video.requests})
            self._happened()

    def _take_frames(self, reference: Any) -> None:
        arrival = self.intake.take(reference)
        self._happened()
        if arrival is None:
            return
        arrival.lane.queue.extend(r for r in arrival.requests if r.footage not in arrival.failed)
        # no request that is not in an engine already can be answered
        held = {name for lane in self.lanes for name in lane.held}
        lost = [r for r in arrival.video.requests if r.footage in arrival.failed]
        for request in lost:
            if (name := request.request_id) in self.open and name not in held:
                self.suspects.drop([name])
                self._answer(Result(name, [], "", "error", error=arrival.failed[request.footage]))

    # ------------------------------------------------------------------------------------------------- the engines

    def start(self, lane: Lane) -> None:
        """Asks for an engine in the place of the one before."""
        lane.engine, lane.ready = self.hands.start(lane.slots)

    def feed(self, lane: Lane) -> None:
        """Hands an engine suspects if they wait and it is empty, else what was decoded for it or is left by others."""
        if not lane.up or lane.trial is not None:
            return
        if lane.answered >= RECYCLE:
            if not lane.held:
                self._replace(lane)
            return
        if not lane.held and (group := self._trial(lane)) is not None:
            lane.trial = group
            requests = [self.open[name][0] for name in group.requests]
            self._set_up(lane, self.open[group.requests[0]][1].turn.wave.setup)
            self._hand_over(lane, requests)
            return
        self._hand_over(lane, self._decoded(lane))

    def _decoded(self, lane: Lane) -> list[Planned]:
        """What the lane takes next, all of it with one setup. The next setup's turn comes once all that was fed in the
        one before has arrived."""
        taken: list[Planned] = []
        while len(taken) < lane.room and (source := self._source(lane)):
            if (known := self.open.get(source[0].request_id)) is None:
                source.popleft()  # its video was lost and cannot be decoded again
                continue
            request, video = known
            if video.pixels is None:
                self.intake.again(video, lane, [source.popleft()])
                continue
            if lane.setup != (setup := lane.fitting(video.turn.wave.setup)):
                if taken or self._arriving(lane):
                    break
                self._set_up(lane, setup)
            source.popleft()
            taken.append(request)
        return taken

    def _set_up(self, lane: Lane, setup: Setup) -> None:
        if lane.setup != (fitting := lane.fitting(setup)):
            lane.setup, lane.turn, lane.arrived = fitting, lane.turn + lane.arrived, False

    def _arriving(self, lane: Lane) -> bool:
        """Whether the engine may not have all yet that it was fed."""
        return any(fed is lane and engine is lane.engine for fed, engine, *_ in self.feeding.values())

    def _source(self, lane: Lane) -> deque[Planned]:
        """What the lane takes from next: its own queue, what a dead engine left, or the queue of a lane that waits for
        its engine."""
        waiting = (other.queue for other in self.lanes if not other.up)
        return next((queue for queue in (lane.queue, self.returned, *waiting) if queue), lane.queue)

    def _trial(self, lane: Lane) -> Group | None:
        """Suspects whose frames are there; what is missing is decoded again."""
        if self._arriving(lane):
            return None
        for _ in range(len(self.suspects.waiting)):
            group = self.suspects.take()
            assert group is not None
            missing = {id(v): v for _, v in map(self.open.__getitem__, group.requests) if v.pixels is None}
            if not missing:
                return group
            for video in missing.values():
                self.intake.again(video, lane, [])
            self.suspects.waiting.append(group)
        return None

    def _hand_over(self, lane: Lane, requests: list[Planned]) -> None:
        if not requests:
            return
        if not lane.held:
            lane.moved()
        setup = lane.setup
        assert setup is not None
        for video, alike in _by_video([self.open[request.request_id] for request in requests]):
            for request in alike:
                lane.held[request.request_id] = request, setup
                self.handed[request.request_id] += 1
            wanted = [self._request(request, video.parts[request.footage][0]) for request in alike]
            numbers = [video.parts[request.footage][1] for request in alike]
            fed = self.hands.feed(lane.engine, wanted, video.pixels, numbers, lane.turn, setup)
            self.feeding[fed] = lane, lane.engine, alike, video.pixels

    def _request(self, planned: Planned, frames: Frames) -> Request:
        room = self.max_model_len - planned.context
        sampling = replace(self.job.sampling, max_tokens=min(self.job.max_tokens, room))
        name, prompt = planned.request_id, planned.item.prompt
        return Request(name, prompt, None, planned.footage, frames.fps, sampling, times=frames.pts)

    # --------------------------------------------------------------------------------------------- what comes back

    def step(self) -> None:
        """Waits, a second at most, for whatever comes first, and takes all there is."""
        of_lanes = [r for lane in self.lanes for r in (*lane.ready, *lane.others, lane.results, lane.beat)]
        references = [*self.intake.decoding, *self.feeding, *(r for r in of_lanes if r is not None)]
        idle = not self.intake.finished and not self.intake.decoding
        for reference in self.hands.wait(references, 0.05 if idle else 1.0):
            self._take(reference)

    def _take(self, reference: Any) -> None:
        if reference in self.intake.decoding:
            self._take_frames(reference)
        elif reference in self.feeding:
            self._take_fed(reference)
        for lane in self.lanes:  # none, if its engine has died a moment ago
            if reference in lane.ready:
                self._take_ready(lane, reference)
            elif reference in lane.others:
                self._take_end(lane, reference)
            elif reference == lane.beat:
                self._take_beat(lane)
            elif reference is lane.results:
                self._take_result(lane)

    def _take_ready(self, lane: Lane, reference: Any) -> None:
        try:
            node = self.hands.get(reference)
        except Gone as gone:
            self._died(lane, gone, " while it started")
            return
        lane.node = lane.node or node
        lane.ready.remove(reference)
        if not lane.ready:
            lane.results, lane.others = self.hands.run(lane.engine)
        lane.moved()
        self._happened()

    def _take_end(self, lane: Lane, reference: Any) -> None:
        """A part of an engine runs for as long as the engine does."""
        try:
            self.hands.get(reference)
        except Gone as gone:
            self._died(lane, gone)
        else:
            self._died(lane, Gone("worker_killed", "a part of it ended by itself"))

    def _take_fed(self, reference: Any) -> None:
        """Frames that were lost on their way are decoded again; of an engine's end its stream tells."""
        lane, engine, requests, pixels = self.feeding.pop(reference)
        try:
            self.hands.get(reference)
            lane.arrived = lane.arrived or lane.engine is engine
        except Gone as gone:
            if gone.code == "lost" and lane.engine is engine:
                self._lost(lane, [r for r in requests if r.request_id in lane.held], pixels)

    def _lost(self, lane: Lane, requests: list[Planned], pixels: Any) -> None:
        """Requests that share frames never reached the engine; suspects stay suspects."""
        for request in requests:
            del lane.held[request.request_id]
        for video in {id(v): v for _, v in (self.open[r.request_id] for r in requests)}.values():
            if video.pixels is pixels:
                video.pixels = None
        if lane.trial is not None and requests:
            alone = lane.trial.alone if len(lane.trial.requests) == 1 else 0
            self.suspects.put_back(Group(tuple(r.request_id for r in requests), alone))
        else:
            lane.queue.extendleft(reversed(requests))
        self._end_trial(lane)

    def _take_beat(self, lane: Lane) -> None:
        reference, lane.beat = lane.beat, None
        try:
            pulse = self.hands.get(reference)
        except Gone:
            return  # its stream tells
        if pulse != lane.pulse:
            lane.pulse = pulse
            lane.moved()
            self._happened()

    def _take_result(self, lane: Lane) -> None:
        try:
            result = self.hands.following(lane.results)
        except Gone as gone:
            self._died(lane, gone)
            return
        lane.moved()
        if (held := lane.held.pop(result.request_id, None)) is not None:
            lane.answered += 1
            self.barren = 0
            self._answer(result, held[1])
        self._end_trial(lane)

    def _end_trial(self, lane: Lane) -> None:
        if lane.trial is not None and not lane.held:
            lane.trial = None

    def _answer(self, result: Result, setup: Setup | None = None) -> None:
        request, video = self.open.pop(result.request_id)
        self._happened()
        self.answered += 1
        self.intake.answered(video)
        turn = video.turn
        turn.left -= 1
        if setup == turn.wave.setup:
            turn.results.append(result)
        if not turn.left:
            self.waves.through(turn.wave, turn.results)
        attempts = self.handed.pop(result.request_id, 0) or video.tries
        draft = (setup or turn.wave.setup).draft
        self.emit(Answer(request, video.frames_of(request), result, attempts, draft))

    # -------------------------------------------------------------------------------------------------- what fails

    def _died(self, lane: Lane, gone: Gone, when: str = "") -> None:
        """An engine is gone: what it held is run again, as suspects, or with half the slots if its memory was full."""
        trial, queue, setup = lane.trial, lane.queue, lane.setup
        code, why = CODES.get(gone.code, gone.code), gone.why + when
        slots = setup.max_num_seqs if setup is not None else lane.slots
        full = code == "out_of_memory" and slots > 1
        if full:
            self._shrink(slots // 2)
            why += f"; from now on {slots // 2} rows at a time"
        held = self._replace(lane)
        names = tuple(request.request_id for request in held)
        self.deaths += 1
        if full and trial is not None and held:
            self.suspects.put_back(replace(trial, requests=names))
        elif full:
            queue.extendleft(reversed(held))
        elif (culprit := self.suspects.died(names, trial)) is not None:
            self._blame(culprit, code, why)
        self.barren = 0 if held else self.barren + 1
        if self.barren >= STARTS:
            raise RunError(f"the engine is gone: {why}, {self.barren} times in a row; {RESUMES}")
        self.returned.extend(queue)
        queue.clear()
        told = f"engine {lane.number} is replaced: {why}; {len(held)} requests run again"
        print(told, file=sys.stderr, flush=True)

    def _shrink(self, slots: int) -> None:
        """In all engines: what was planned is too much for one of them."""
        self.waves.shrink(slots)
        for lane in self.lanes:
            lane.slots = min(lane.slots, slots)

    def _replace(self, lane: Lane) -> list[Planned]:
        self.hands.kill(lane.engine)
        held = lane.lost()
        self.start(lane)
        return held

    def _blame(self, culprit: str, code: str, why: str) -> None:
        self.blamed += 1
        message = f"an engine that had nobody else ended twice: {why}"
        self._answer(Result(culprit, [], "", "error", error=RequestError(code, message)))
        if self.blamed >= STARTS and self.blamed == self.answered:
            raise RunError(f"each of the first {self.blamed} requests ended its engine: {why}; {RESUMES}")

    def watch(self) -> None:
        """Asks engines how far they are; ends those that don't move; ends the run if nothing does."""
        now = time.monotonic()
        if (asleep := now - self.looked) > 5:  # the driver was stopped, or storage kept it waiting
            self.moved += asleep
            for lane in self.lanes:
                lane.alive += asleep
        self.looked = now
        for lane in self.lanes:
            if not lane.up or not lane.held:
                continue
            if now - lane.alive > self.job.engine_timeout:
                self._died(lane, Gone("engine_timeout", f"it had not moved for {self.job.engine_timeout:g} s"))
            elif lane.beat is None and now - lane.asked > BEAT:
                lane.asked, lane.beat = now, self.hands.pulse(lane.engine)
        if now - self.moved > self.job.stall_timeout:
            raise RunError(f"nothing has moved for {self.job.stall_timeout:g} s: {self._stalled()}; {RESUMES}")

    def _happened(self) -> None:
        self.moved = time.monotonic()

    def _stalled(self) -> str:
        """Which stage waits, and for what."""
        starting = [str(lane.number) for lane in self.lanes if not lane.up]
        stages = [
            (self.intake.decoding, f"{len(self.intake.decoding)} videos wait for a CPU to decode on"),
            (starting, f"engine {', '.join(starting)} waits for its start"),
            (not self.intake.finished, "the next headers are being read"),
        ]
        return "; ".join(text for waits, text in stages if waits) + f"; {self.hands.free()}"


def _by_video(requests: list[tuple[Planned, Video]]) -> Iterator[tuple[Video, list[Planned]]]:
    """Neighbours that share frames."""
    alike: list[Planned] = []
    for number, (request, video) in enumerate(requests):
        alike.append(request)
        if number + 1 == len(requests) or requests[number + 1][1] is not video:
            yield video, alike
            alike = []
