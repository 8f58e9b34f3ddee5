"""What engines are handed, and when: decoded requests a few ahead of the slots, one setup after the
other; suspects, of an engine's death, to an engine that holds nothing else."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import Job
from pipeline.driver.backend import Backend, WorkerLost
from pipeline.driver.decode_queue import Intake
from pipeline.driver.replica import Replica, Video
from pipeline.driver.suspects import Group, Suspects
from pipeline.records import EngineConfig, Frames, PlannedRequest
from std_core.types import Request


@dataclass
class Handover:
    """A lane's `queue`, or what others have left → its `held`."""

    job: Job
    max_model_len: int
    backend: Backend
    replicas: list[Replica]
    intake: Intake
    open: dict[str, tuple[PlannedRequest, Video]] = field(
        default_factory=dict
    )  # all requests between plan and answer
    feeding: dict[Any, tuple[Replica, Any, list[PlannedRequest], Any]] = field(default_factory=dict)
    returned: deque[PlannedRequest] = field(
        default_factory=deque
    )  # decoded for a lane whose engine died
    suspects: Suspects = field(default_factory=Suspects)
    handed: Counter[str] = field(
        default_factory=Counter
    )  # id → engines that were handed the request

    def feed(self, replica: Replica) -> None:
        """Hands an engine suspects if they wait and it is empty, else what was decoded for it or is
        left by others."""
        if not replica.up or replica.trial is not None or replica.retires:
            return
        if not replica.held and (group := self._trial(replica)) is not None:
            replica.trial = group
            requests = [self.open[name][0] for name in group.requests]
            self._set_up(replica, self.open[group.requests[0]][1].turn.wave.engine_config)
            self._hand_over(replica, requests)
            return
        self._hand_over(replica, self._decoded(replica))

    def _decoded(self, replica: Replica) -> list[PlannedRequest]:
        """What the lane takes next, all of it with one setup. The next setup's turn comes once all
        that was fed in the one before has arrived."""
        taken: list[PlannedRequest] = []
        while len(taken) < replica.room and (source := self._source(replica)):
            if (known := self.open.get(source[0].request_id)) is None:
                source.popleft()  # its video was lost and cannot be decoded again
                continue
            request, video = known
            if video.pixels is None:
                self.intake.again(video, replica, [source.popleft()])
                continue
            if replica.setup != (setup := replica.fitting(video.turn.wave.engine_config)):
                if taken or self._arriving(replica):
                    break
                self._set_up(replica, setup)
            source.popleft()
            taken.append(request)
        return taken

    def _set_up(self, replica: Replica, setup: EngineConfig) -> None:
        if replica.setup != (fitting := replica.fitting(setup)):
            replica.setup = fitting
            replica.turn = replica.turn + replica.arrived
            replica.arrived = False

    def _arriving(self, replica: Replica) -> bool:
        """Whether the engine may not have all yet that it was fed."""
        return any(
            fed is replica and engine is replica.engine for fed, engine, *_ in self.feeding.values()
        )

    def _source(self, replica: Replica) -> deque[PlannedRequest]:
        """What the lane takes from next: its own queue, what a dead engine left, or the queue of a
        lane that waits for its engine."""
        waiting = (other.queue for other in self.replicas if not other.up)
        return next(
            (queue for queue in (replica.queue, self.returned, *waiting) if queue), replica.queue
        )

    def _trial(self, replica: Replica) -> Group | None:
        """Suspects whose frames are there; what is missing is decoded again."""
        if self._arriving(replica):
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
                self.intake.again(video, replica, [])
            self.suspects.waiting.append(group)
        return None

    def _hand_over(self, replica: Replica, requests: list[PlannedRequest]) -> None:
        if not requests:
            return
        if not replica.held:
            replica.moved()
        setup = replica.setup
        assert setup is not None
        for video, alike in _by_video([self.open[request.request_id] for request in requests]):
            for request in alike:
                replica.held[request.request_id] = request, setup
                self.handed[request.request_id] += 1
            wanted = [
                self._request(request, video.parts[request.frames_key][0]) for request in alike
            ]
            numbers = [video.parts[request.frames_key][1] for request in alike]
            # a turn may go through several waves, each with its own gamma schedule
            own = replica.fitting(video.turn.wave.engine_config)
            scheduled = own if own == setup else setup
            fed = self.backend.feed(
                replica.engine, wanted, video.pixels, numbers, replica.turn, scheduled
            )
            self.feeding[fed] = replica, replica.engine, alike, video.pixels

    def _request(self, planned: PlannedRequest, frames: Frames) -> Request:
        room = self.max_model_len - planned.context
        sampling = replace(self.job.sampling, max_tokens=min(self.job.max_tokens, room))
        name = planned.request_id
        prompt = planned.input_row.prompt
        return Request(
            name,
            prompt=prompt,
            frames=None,
            video_id=planned.frames_key,
            fps=frames.fps,
            sampling=sampling,
            times=frames.pts,
        )

    def take(self, reference: Any) -> None:
        """Frames that were lost on their way are decoded again; of an engine's end its stream
        tells."""
        replica, engine, requests, pixels = self.feeding.pop(reference)
        try:
            self.backend.get(reference)
            replica.arrived = replica.arrived or replica.engine is engine
        except WorkerLost as gone:
            if gone.code == "lost" and replica.engine is engine:
                self._lost(replica, [r for r in requests if r.request_id in replica.held], pixels)

    def _lost(self, replica: Replica, requests: list[PlannedRequest], pixels: Any) -> None:
        """Requests that share frames never reached the engine; suspects stay suspects."""
        for request in requests:
            del replica.held[request.request_id]
        for video in {id(v): v for _, v in (self.open[r.request_id] for r in requests)}.values():
            if video.pixels is pixels:
                video.pixels = None
        if replica.trial is not None and requests:
            alone = replica.trial.alone if len(replica.trial.requests) == 1 else 0
            self.suspects.put_back(Group(tuple(r.request_id for r in requests), alone))
        else:
            replica.queue.extendleft(reversed(requests))
        self.end_trial(replica)

    def end_trial(self, replica: Replica) -> None:
        """Once the suspects have left the engine."""
        if replica.trial is not None and not replica.held:
            replica.trial = None


def _by_video(
    requests: list[tuple[PlannedRequest, Video]],
) -> Iterator[tuple[Video, list[PlannedRequest]]]:
    """Neighbours that share frames."""
    alike: list[PlannedRequest] = []
    for number, (request, video) in enumerate(requests):
        alike.append(request)
        if number + 1 == len(requests) or requests[number + 1][1] is not video:
            yield video, alike
            alike = []
