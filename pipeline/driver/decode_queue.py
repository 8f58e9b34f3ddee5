"""Videos on their way to the engines: which decodes next and for which lane, within bounds of bytes
and of requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pipeline.driver import replica as replica_module
from pipeline.driver.backend import Backend, WaveSource, WorkerLost
from pipeline.driver.replica import Replica, Video
from pipeline.records import Frames, PlannedRequest, RequestError

MAX_DECODE_ATTEMPTS = 3  # tries at a video whose decoding process dies
# what a row says of a process that ended
CODES = {"worker_killed": "decode_error", "lost": "decode_crashed", "crashed": "decode_crashed"}


@dataclass(frozen=True)
class Arrival:
    """A video whose decoding has ended, and the requests that waited for it in a lane."""

    video: Video
    replica: Replica
    requests: list[PlannedRequest]
    failed: dict[str, RequestError]  # by footage


@dataclass
class Intake:
    """`coming` → decoding → a lane's `queue`. `bound` is of the bytes of frames that are decoding
    or held."""

    backend: Backend
    waves: WaveSource
    replicas: list[Replica]
    bound: int
    decoding: dict[Any, tuple[Video, Replica, list[PlannedRequest], Any]] = field(
        default_factory=dict
    )
    nbytes: int = 0
    most_nbytes: int = 0
    decoded: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more will be decoded for the first time."""
        return self.waves.closed and not any(replica.coming for replica in self.replicas)

    def admit(self) -> Video | None:
        """Starts to decode what fits in memory and is near enough to its turn, for the lane with
        the least ahead."""
        replica = min(
            self.replicas, key=lambda replica: (replica.ahead / replica.slots, not replica.up)
        )
        if self.nbytes and replica.ahead >= replica_module.AHEAD * replica.slots:
            return None
        source = self._source(replica)
        at = 0 if source is replica.coming else -1
        # a video beyond the bounds goes alone
        if not source or (self.nbytes and self.nbytes + source[at].nbytes > self.bound):
            return None
        video = source[at]
        del source[at]
        self.nbytes += video.nbytes
        self.most_nbytes = max(self.nbytes, self.most_nbytes)
        self.decode(video, replica, video.requests)
        return video

    def _source(self, replica: Replica) -> deque[Video]:
        """What is coming for the lane; where there is no wave left, for the one that has the most
        to come."""
        if (
            not replica.coming
            and (wave := self.waves.take(engine_idle=not replica.ahead)) is not None
        ):
            replica.coming.extend(replica_module.videos(wave))
        return replica.coming or max((other.coming for other in self.replicas), key=len)

    def decode(self, video: Video, replica: Replica, requests: list[PlannedRequest]) -> None:
        """Starts decoding; `requests` of the video wait for it."""
        known, pixels = self.backend.decode(video.requests[0].info, video.plan, replica.node)
        video.pixels = None
        video.tries = video.tries + 1
        replica.decoding += len(requests)
        self.decoding[known] = (video, replica, requests, pixels)

    def again(self, video: Video, replica: Replica, requests: list[PlannedRequest]) -> None:
        """As `decode`, of a video whose frames were lost; once, whoever asks."""
        for under_way, its, waiting, _ in self.decoding.values():
            if under_way is video:
                its.decoding += len(requests)
                waiting += requests
                return
        self.decode(video, replica, requests)

    def take(self, reference: Any) -> Arrival | None:
        """What a decoding has led to; None where it is tried again."""
        video, replica, requests, pixels = self.decoding.pop(reference)
        replica.decoding -= len(requests)
        known = self._known(reference)
        if isinstance(known, RequestError) and known.code == "decode_crashed":
            video.crashes += 1
            if video.crashes < MAX_DECODE_ATTEMPTS:
                self.decode(video, replica, requests)  # somebody else may have killed the process
                return None
        self.decoded += 1
        if isinstance(known, RequestError):
            failed = {request.frames_key: known for request in video.requests}
        else:
            failed = video.arrived(known, pixels)
        return Arrival(video, replica, requests, failed)

    def _known(self, reference: Any) -> Frames | RequestError:
        try:
            return self.backend.get(reference)
        except WorkerLost as gone:
            return RequestError(CODES.get(gone.code, gone.code), f"decoding failed: {gone.why}")

    def answered(self, video: Video) -> None:
        """One of a video's requests needs it no longer."""
        video.left -= 1
        if not video.left:
            self.nbytes -= video.nbytes
            video.pixels = None
