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

from pipeline import flow
from pipeline.config import Job
from pipeline.flow import Lane, Status, Video
from pipeline.hands import RESUMES, Gone, Hands, Waves
from pipeline.suspects import Group, Suspects
from pipeline.types import Frames, Planned, RequestError, RunError
from std_core.types import Request, Result

BEAT = 1.0  # s between two questions to an engine how far it is
DRAIN = 20.0  # s that engines may go on after SIGTERM
RECYCLE = 10_000  # requests that an engine answers before another takes its place: what leaks is given back
STARTS = 3  # engines in a row that end before anything is answered, beyond what suspects explain
DECODES = 3  # tries at a video whose decoding process dies
# what a row says of a process that ended
OF_DECODERS = {"worker_killed": "decode_error", "lost": "decode_crashed", "crashed": "decode_crashed"}
OF_ENGINES = {"lost": "worker_killed", "crashed": "worker_killed"}

Emit = Callable[[Planned, Frames | None, Result, int], None]


@dataclass
class Fleet:
    """The engines and what is on its way to them: `coming` → decoding → a lane's `queue` → its `held` → answered."""

    job: Job
    waves: Waves
    max_model_len: int
    emit: Emit
    tick: Callable[[], None]
    notice: Callable[[Status], None]
    hands: Hands
    slots: int  # of engines that start from now on
    bound: int  # of the bytes of frames
    lanes: list[Lane] = field(default_factory=list)
    coming: deque[Video] = field(default_factory=deque)  # of the wave that was taken last
    open: dict[str, tuple[Planned, Video]] = field(default_factory=dict)  # all requests between plan and answer
    decoding: dict[Any, tuple[Video, Lane, list[Planned], Any]] = field(default_factory=dict)
    feeding: dict[Any, tuple[Lane, Any, list[Planned], Any]] = field(default_factory=dict)
    returned: deque[Planned] = field(default_factory=deque)  # decoded for a lane whose engine died
    suspects: Suspects = field(default_factory=Suspects)
    handed: Counter[str] = field(default_factory=Counter)  # id → engines that were handed the request
    nbytes: int = 0  # of frames that are decoding or held
    most_nbytes: int = 0
    decoded: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    deaths: int = 0
    barren: int = 0  # engines that ended without having been handed anything, since the last answer
    blamed: int = 0
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)  # when anything last happened
    looked: float = field(default_factory=time.monotonic)  # when the driver last looked

    # ---------------------------------------------------------------------------------------------------- the loop

    def run(self, stopped: list[int]) -> None:
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
            self.notice(self.status())

    def close(self) -> None:
        """Ends what runs; else its resources stay taken for as long as anything here still names it."""
        for reference in self.decoding:
            self.hands.cancel(reference)
        for lane in self.lanes:
            if lane.engine is not None:
                self.hands.kill(lane.engine)

    @property
    def finished(self) -> bool:
        return self.waves.closed and not self.coming and not self.open

    def _drain(self, stopped: list[int]) -> None:
        """Lets engines finish what they hold, until a second signal or for a while."""
        ends, count = time.monotonic() + DRAIN, len(stopped)
        while any(lane.held for lane in self.lanes) and time.monotonic() < ends and len(stopped) == count:
            self.step()
            self.watch()
            self.tick()

    def status(self) -> Status:
        engines = sum(lane.up for lane in self.lanes)
        return Status(
            seconds=time.monotonic() - self.began,
            answered=self.answered,
            failed=self.failed,
            tokens=self.tokens,
            decoding=len(self.decoding),
            waiting=sum(len(lane.queue) for lane in self.lanes) + len(self.returned),
            held=sum(len(lane.held) for lane in self.lanes),
            engines=engines,
            starting=len(self.lanes) - engines,
            deaths=self.deaths,
            suspects=sum(len(group.requests) for group in self.suspects.waiting),
            nbytes=self.nbytes,
            most_nbytes=self.most_nbytes,
            bound=self.bound,
        )

    # ------------------------------------------------------------------------------------------------ decoding ahead

    def admit(self) -> None:
        """Starts decoding what fits in memory and is near enough to its turn, for the lane with the least ahead."""
        while (video := self._next()) is not None:
            lane = min(self.lanes, key=lambda lane: (lane.ahead / lane.slots, not lane.up))
            # a video beyond the bounds goes alone
            if self.nbytes and (lane.ahead >= flow.AHEAD * lane.slots or self.nbytes + video.nbytes > self.bound):
                return
            self.coming.popleft()
            self.nbytes += video.nbytes
            self.most_nbytes = max(self.nbytes, self.most_nbytes)
            self.open.update({request.request_id: (request, video) for request in video.requests})
            self._decode(video, lane, video.requests)

    def _next(self) -> Video | None:
        """Looks at the next video without taking it."""
        if not self.coming and (wave := self.waves.take()) is not None:
            self._happened()
            self.coming.extend(flow.videos(wave))
        return self.coming[0] if self.coming else None

    def _decode(self, video: Video, lane: Lane, requests: list[Planned]) -> None:
        """Starts decoding; `requests` of the video wait for it."""
        first = video.requests[0]
        known, pixels = self.hands.decode(first.info, first.plan, lane.node)
        video.pixels, video.tries = None, video.tries + 1
        lane.decoding += len(requests)
        self.decoding[known] = (video, lane, requests, pixels)

    def _decode_again(self, video: Video, lane: Lane, requests: list[Planned]) -> None:
        """As `_decode`, of a video whose frames were lost; once, whoever asks."""
        for under_way, its, waiting, _ in self.decoding.values():
            if under_way is video:
                its.decoding += len(requests)
                waiting += requests
                return
        self._decode(video, lane, requests)

    def _take_frames(self, reference: Any) -> None:
        video, lane, requests, pixels = self.decoding.pop(reference)
        lane.decoding -= len(requests)
        try:
            known = self.hands.get(reference)
        except Gone as gone:
            known = RequestError(OF_DECODERS.get(gone.code, gone.code), f"decoding failed: {gone.why}")
        self._happened()
        if isinstance(known, RequestError) and known.code == "decode_crashed":
            video.crashes += 1
            if video.crashes < DECODES:
                self._decode(video, lane, requests)  # somebody else may have killed the process
                return
        self.decoded += 1
        if isinstance(known, RequestError):
            self._undecodable(video, known)
            return
        video.frames, video.pixels = known, pixels
        lane.queue.extend(requests)

    def _undecodable(self, video: Video, error: RequestError) -> None:
        """No request of the video that is not in an engine already can be answered."""
        held = {name for lane in self.lanes for name in lane.held}
        names = [r.request_id for r in video.requests if r.request_id in self.open and r.request_id not in held]
        self.suspects.drop(names)
        for name in names:
            self._answer(Result(name, [], "", "error", error=error))

    # ------------------------------------------------------------------------------------------------- the engines

    def start(self, lane: Lane) -> None:
        """Asks for an engine in the place of the one before."""
        lane.slots = min(lane.slots, self.slots)
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
            self._hand_over(lane, [self.open[name][0] for name in group.requests])
            return
        requests: list[Planned] = []
        while len(requests) < lane.room and (source := self._source(lane)):
            request = source.popleft()
            if request.request_id not in self.open:
                continue  # its video was lost and cannot be decoded again
            if (video := self.open[request.request_id][1]).pixels is None:
                self._decode_again(video, lane, [request])
            else:
                requests.append(request)
        self._hand_over(lane, requests)

    def _source(self, lane: Lane) -> deque[Planned]:
        """What the lane takes from next: its own queue, what a dead engine left, or the queue of a lane that waits for
        its engine."""
        waiting = (other.queue for other in self.lanes if not other.up)
        return next((queue for queue in (lane.queue, self.returned, *waiting) if queue), lane.queue)

    def _trial(self, lane: Lane) -> Group | None:
        """Suspects whose frames are there; what is missing is decoded again."""
        for _ in range(len(self.suspects.waiting)):
            group = self.suspects.take()
            assert group is not None
            missing = {id(v): v for _, v in map(self.open.__getitem__, group.requests) if v.pixels is None}
            if not missing:
                return group
            for video in missing.values():
                self._decode_again(video, lane, [])
            self.suspects.waiting.append(group)
        return None

    def _hand_over(self, lane: Lane, requests: list[Planned]) -> None:
        if requests and not lane.held:
            lane.moved()
        for video, alike in _by_video([self.open[request.request_id] for request in requests]):
            for request in alike:
                lane.held[request.request_id] = request
                self.handed[request.request_id] += 1
            assert video.frames is not None
            wanted = [self._request(request, video.frames.fps) for request in alike]
            self.feeding[self.hands.feed(lane.engine, wanted, video.pixels)] = (
                lane,
                lane.engine,
                alike,
                video.pixels,
            )

    def _request(self, planned: Planned, fps: float) -> Request:
        room = self.max_model_len - planned.context
        sampling = replace(self.job.sampling, max_tokens=min(self.job.max_tokens, room))
        return Request(planned.request_id, planned.item.prompt, None, planned.info.uri, fps, sampling)

    # --------------------------------------------------------------------------------------------- what comes back

    def step(self) -> None:
        """Waits, a second at most, for whatever comes first, and takes all there is."""
        of_lanes = [r for lane in self.lanes for r in (lane.ready, lane.results, lane.beat) if r is not None]
        references = [*self.decoding, *self.feeding, *of_lanes]
        idle = not self.waves.closed and not self.coming and not self.decoding
        for reference in self.hands.wait(references, 0.05 if idle else 1.0):
            self._take(reference)

    def _take(self, reference: Any) -> None:
        if reference in self.decoding:
            self._take_frames(reference)
        elif reference in self.feeding:
            self._take_fed(reference)
        for lane in self.lanes:  # none, if its engine has died a moment ago
            if reference == lane.ready:
                self._take_ready(lane)
            elif reference == lane.beat:
                self._take_beat(lane)
            elif reference is lane.results:
                self._take_result(lane)

    def _take_ready(self, lane: Lane) -> None:
        try:
            lane.node, lane.ready = self.hands.get(lane.ready), None
        except Gone as gone:
            self._died(lane, OF_ENGINES.get(gone.code, gone.code), f"{gone.why} while it started")
            return
        lane.results = self.hands.run(lane.engine)
        lane.moved()
        self._happened()

    def _take_fed(self, reference: Any) -> None:
        """Frames that were lost on their way are decoded again; of an engine's end its stream tells."""
        lane, engine, requests, pixels = self.feeding.pop(reference)
        try:
            self.hands.get(reference)
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
            self._died(lane, OF_ENGINES.get(gone.code, gone.code), gone.why)
            return
        lane.moved()
        if lane.held.pop(result.request_id, None) is not None:
            lane.answered += 1
            self.barren = 0
            self._answer(result)
        self._end_trial(lane)

    def _end_trial(self, lane: Lane) -> None:
        if lane.trial is not None and not lane.held:
            lane.trial = None

    def _answer(self, result: Result) -> None:
        request, video = self.open.pop(result.request_id)
        self._happened()
        self.answered += 1
        self.failed += result.error is not None
        self.tokens += len(result.token_ids)
        video.left -= 1
        if not video.left:
            self.nbytes -= video.nbytes
            video.pixels = None
        self.emit(request, video.frames, result, self.handed.pop(result.request_id, 0) or video.tries)

    # -------------------------------------------------------------------------------------------------- what fails

    def _died(self, lane: Lane, code: str, why: str) -> None:
        """An engine is gone: what it held is run again, as suspects, or with half the slots if its memory was full."""
        trial, queue, slots = lane.trial, lane.queue, lane.slots
        full = code == "out_of_memory" and slots > 1
        if full:
            self.slots = min(self.slots, slots // 2)
            why += f"; from now on {self.slots} rows at a time"
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
                self._died(lane, "engine_timeout", f"it had not moved for {self.job.engine_timeout:g} s")
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
            (self.decoding, f"{len(self.decoding)} videos wait for a CPU to decode on"),
            (starting, f"engine {', '.join(starting)} waits for its start"),
            (not self.waves.closed and not self.coming, "the next headers are being read"),
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
