"""The plan as a run goes on: requests whose headers are read, until engines are handed them in
waves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipeline.intake.prefetch import Source
from pipeline.plan.history import History
from pipeline.plan.settings import WaveConfig
from pipeline.plan.waves import misfit, plan
from pipeline.records import (
    FailedRequest,
    PendingRequest,
    PlannedRequest,
    ProbedRequest,
    UsageError,
    Wave,
)
from std_core.cost_model.profile import Device, Profile
from std_core.types import Result

# requests that a wave is chosen from: many more would be of no use, and looked through for each
# wave
POOL = 8192
FRAMES = 2_000_000  # of theirs: the times of that many are 64 MB


class Pool:
    """`pipeline.driver.backend.WaveSource` of what `found` gives.

    Args:
        found: requests that are planned, and such as have failed before.
        failed: gets each of the latter once, and those that no device is large enough for.
        handed: gets each wave as it is taken.
        profile_on: what is known of a device; raises UsageError.
        setting: the job's; the number of engines comes with `begin`.
    """

    def __init__(
        self,
        found: Source[list[ProbedRequest]],
        failed: Callable[[FailedRequest], None],
        handed: Callable[[Wave], None],
        profile_on: Callable[[Device], Profile],
        setting: WaveConfig,
    ):
        self._found = found
        self._failed = failed
        self._handed = handed
        self._profile_on = profile_on
        self.setting = setting
        self.history = History()
        self.profile: Profile | None = None
        self._planned: deque[PlannedRequest] = deque()  # not looked at yet
        self._pool: list[PlannedRequest] = []
        self._frames = 0  # of the pool's
        self._small: list[FailedRequest] = []  # too large for the device, as long as all are
        self._fitting = False  # whether any request was not
        self._refused = -1  # size of the pool that was too small for a wave

    def waiting(self) -> bool:
        """Takes what was found within a second; whether there is nothing to run yet, but may be."""
        self._sort(self._found.take(1.0) or [])
        return not self._planned and not self._found.closed

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run at this moment."""
        return not self._planned and not self._pool

    def begin(self, device: Device, engines: int) -> None:
        """See `WaveSource`. Raises UsageError also where it is known by now that no request fits the
        device."""
        self.profile, self.setting = (
            self._profile_on(device),
            replace(self.setting, engines=engines),
        )
        self._fill()

    @property
    def closed(self) -> bool:
        """See `WaveSource`."""
        return self._found.closed and self.empty and not self._small

    def take(self, engine_idle: bool) -> Wave | None:
        """See `WaveSource`. Raises UsageError once it is known that no request fits the device."""
        assert self.profile is not None, "begin comes first"
        self._fill()
        now = engine_idle or self._full or self._found.closed
        if not self._pool or (not now and self._refused == len(self._pool)):
            return None
        waves = plan(self._pool, self.profile, self.history, 1, now, self.setting)
        self._refused = len(self._pool)
        for wave in waves:
            self._hand_out(wave)
        return waves[0] if waves else None

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """See `WaveSource`."""
        if results:
            self.history = self.history.observed(wave, results)

    def limit_slots(self, slots: int) -> None:
        """See `WaveSource`."""
        self.setting = replace(self.setting, max_num_seqs=min(slots, self.setting.max_num_seqs))

    @property
    def _full(self) -> bool:
        return len(self._pool) >= POOL or self._frames >= FRAMES

    def _hand_out(self, wave: Wave) -> None:
        ids = {request.request_id for request in wave.requests}
        self._pool = [request for request in self._pool if request.request_id not in ids]
        self._frames -= sum(len(request.frame_plan.times) for request in wave.requests)
        self.history = self.history.issued(1)
        self._handed(wave)

    def _fill(self) -> None:
        while not self._full:
            if self._planned:
                self._admit(self._planned.popleft())
            elif found := self._found.take():
                self._sort(found)
            else:
                break
        if self._small and self._found.closed and self.empty and not self._fitting:
            raise UsageError(self._small[-1].error.message)

    def _sort(self, found: Sequence[ProbedRequest]) -> None:
        for one in found:
            if isinstance(one, FailedRequest):
                self._failed(one)
            else:
                self._planned.append(one)

    def _admit(self, request: PlannedRequest) -> None:
        """What is too large for the device fails once there is something that is not."""
        assert self.profile is not None
        if error := misfit(request, self.profile, self.setting):
            self._small.append(
                FailedRequest(
                    PendingRequest(request.request_id, request.input_row, request.window),
                    error,
                    request.info,
                )
            )
        else:
            self._fitting = True
            self._pool.append(request)
            self._frames += len(request.frame_plan.times)
        if self._fitting:
            for small in self._small:
                self._failed(small)
            self._small = []


def fitting(
    found: Sequence[PlannedRequest], profile: Profile, setting: WaveConfig
) -> Iterator[PlannedRequest | FailedRequest]:
    """As `Pool` has it, of requests that are all there. Raises UsageError where none fits the
    device."""
    errors = [misfit(request, profile, setting) for request in found]
    if found and all(errors):
        raise UsageError(next(e.message for e in reversed(errors) if e))
    for request, error in zip(found, errors, strict=True):
        pending = PendingRequest(request.request_id, request.input_row, request.window)
        yield FailedRequest(pending, error, request.info) if error else request
