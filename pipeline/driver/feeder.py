"""What engines are handed, and when: decoded requests a few ahead of the slots, one setup after the
other; suspects, of an engine's death, to an engine that holds nothing else."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import Job
from pipeline.driver.backend import Gone, Hands
from pipeline.driver.decode_queue import Intake
from pipeline.driver.replica import Lane, Video
from pipeline.driver.suspects import Group, Suspects
from pipeline.records import Frames, Planned, Setup
from std_core.types import Request


@dataclass
class Handover:
    """A lane's `queue`, or what others have left → its `held`."""

    job: Job
    max_model_len: int
    hands: Hands
    lanes: list[Lane]
    intake: Intake
    open: dict[str, tuple[Planned, Video]] = field(
        default_factory=dict
    )  # all requests between plan and answer
    feeding: dict[Any, tuple[Lane, Any, list[Planned], Any]] = field(default_factory=dict)
    returned: deque[Planned] = field(default_factory=deque)  # decoded for a lane whose engine died
    suspects: Suspects = field(default_factory=Suspects)
    handed: Counter[str] = field(
        default_factory=Counter
    )  # id → engines that were handed the request

    def feed(self, lane: Lane) -> None:
        """Hands an engine suspects if they wait and it is empty, else what was decoded for it or is
        left by others."""
        if not lane.up or lane.trial is not None or lane.retires:
            return
        if not lane.held and (group := self._trial(lane)) is not None:
            lane.trial = group
            requests = [self.open[name][0] for name in group.requests]
            self._set_up(lane, self.open[group.requests[0]][1].turn.wave.setup)
            self._hand_over(lane, requests)
            return
        self._hand_over(lane, self._decoded(lane))

    def _decoded(self, lane: Lane) -> list[Planned]:
        """What the lane takes next, all of it with one setup. The next setup's turn comes once all
        that was fed in the one before has arrived."""
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
            lane.setup = fitting
            lane.turn = lane.turn + lane.arrived
            lane.arrived = False

    def _arriving(self, lane: Lane) -> bool:
        """Whether the engine may not have all yet that it was fed."""
        return any(
            fed is lane and engine is lane.engine for fed, engine, *_ in self.feeding.values()
        )

    def _source(self, lane: Lane) -> deque[Planned]:
        """What the lane takes from next: its own queue, what a dead engine left, or the queue of a
        lane that waits for its engine."""
        waiting = (other.queue for other in self.lanes if not other.up)
        return next((queue for queue in (lane.queue, self.returned, *waiting) if queue), lane.queue)

    def _trial(self, lane: Lane) -> Group | None:
        """Suspects whose frames are there; what is missing is decoded again."""
        if self._arriving(lane):
            return None
        for _ in range(len(self.suspects.waiting)):
            group = self.suspects.take()
            assert group is not None
            missing = {
                id(v): v for _, v in map(self.open.__getitem__, group.requests) if v.pixels is None
            }
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
            own = lane.fitting(
                video.turn.wave.setup
            )  # a turn may go through several waves, each at its own pace
            paced = own if own == setup else setup
            fed = self.hands.feed(lane.engine, wanted, video.pixels, numbers, lane.turn, paced)
            self.feeding[fed] = lane, lane.engine, alike, video.pixels

    def _request(self, planned: Planned, frames: Frames) -> Request:
        room = self.max_model_len - planned.context
        sampling = replace(self.job.sampling, max_tokens=min(self.job.max_tokens, room))
        name = planned.request_id
        prompt = planned.item.prompt
        return Request(
            name,
            prompt=prompt,
            frames=None,
            video=planned.footage,
            fps=frames.fps,
            sampling=sampling,
            times=frames.pts,
        )

    def take(self, reference: Any) -> None:
        """Frames that were lost on their way are decoded again; of an engine's end its stream
        tells."""
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
        self.end_trial(lane)

    def end_trial(self, lane: Lane) -> None:
        """Once the suspects have left the engine."""
        if lane.trial is not None and not lane.held:
            lane.trial = None


def _by_video(requests: list[tuple[Planned, Video]]) -> Iterator[tuple[Video, list[Planned]]]:
    """Neighbours that share frames."""
    alike: list[Planned] = []
    for number, (request, video) in enumerate(requests):
        alike.append(request)
        if number + 1 == len(requests) or requests[number + 1][1] is not video:
            yield video, alike
            alike = []
