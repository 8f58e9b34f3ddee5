"""The requests of a running job that no engine has yet, and the waves made of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.intake.prefetch import Source
from pipeline.plan.capacity import Capacity
from pipeline.plan.history import History
from pipeline.plan.settings import WaveConfig
from pipeline.plan.waves import plan
from pipeline.records import FailedRequest, PlannedRequest, ProbedRequest, UsageError, Wave
from std_core.cost_model.profile import Device, Profile
from std_core.types import Result

# requests in the pool: more make no better waves, and each wave looks through all of them
MAX_REQUESTS = 8192
MAX_FRAMES = 2_000_000  # planned frames in the pool; their times take 64 MB


class RequestPool:
    """Hands out planned requests as waves. Implements `pipeline.driver.backend.WaveSource`.

    Args:
        probed: where requests come from as their headers are read, planned or failed.
        on_failed: gets each failed request, and each that is too large for the device, once.
        on_wave: gets each wave as it is handed out.
        profile_on: the profile of a device; raises UsageError.
        config: the job's; `begin` adds the number of engines.
    """

    def __init__(
        self,
        probed: Source[list[ProbedRequest]],
        on_failed: Callable[[FailedRequest], None],
        on_wave: Callable[[Wave], None],
        profile_on: Callable[[Device], Profile],
        config: WaveConfig,
    ):
        self._probed = probed
        self._on_failed = on_failed
        self._on_wave = on_wave
        self._profile_on = profile_on
        self.config = config
        self.history = History()
        self.profile: Profile | None = None
        self._unchecked: deque[PlannedRequest] = deque()  # not yet compared with the device
        self._pool: list[PlannedRequest] = []
        self._frames = 0  # planned frames of the pool's requests
        self._too_large: list[FailedRequest] = []  # reported once any request fits the device
        self._any_fits = False
        self._size_without_wave = -1  # size of the pool when `plan` last returned no wave

    def poll(self) -> bool:
        """Receives requests for up to a second. True while there is none to run but more may
        come."""
        self._receive(self._probed.take(1.0) or [])
        return not self._unchecked and not self._probed.closed

    @property
    def empty(self) -> bool:
        """Whether no request waits at this moment."""
        return not self._unchecked and not self._pool

    def begin(self, device: Device, engines: int) -> None:
        """See `WaveSource`. Raises UsageError also if all requests are known and none fits the
        device."""
        self.profile = self._profile_on(device)
        self.config = replace(self.config, engines=engines)
        self._fill()

    @property
    def closed(self) -> bool:
        """See `WaveSource`."""
        return self._probed.closed and self.empty and not self._too_large

    def take(self, engine_idle: bool) -> Wave | None:
        """See `WaveSource`. Raises UsageError once it is known that no request fits the device."""
        assert self.profile is not None, "begin comes first"
        self._fill()
        partial = engine_idle or self._full or self._probed.closed  # a partial wave will do
        unchanged = self._size_without_wave == len(self._pool)
        if not self._pool or (unchanged and not partial):
            return None
        waves = plan(
            self._pool,
            self.profile,
            self.history,
            idle_engines=1,
            closed=partial,
            config=self.config,
        )
        if not waves:
            self._size_without_wave = len(self._pool)
            return None
        self._size_without_wave = -1
        self._hand_out(waves[0])
        return waves[0]

    def complete(self, wave: Wave, results: Sequence[Result]) -> None:
        """See `WaveSource`."""
        if results:
            self.history = self.history.with_results(wave, results)

    def limit_slots(self, slots: int) -> None:
        """See `WaveSource`."""
        self.config = replace(self.config, max_num_seqs=min(slots, self.config.max_num_seqs))

    @property
    def _full(self) -> bool:
        return len(self._pool) >= MAX_REQUESTS or self._frames >= MAX_FRAMES

    def _hand_out(self, wave: Wave) -> None:
        ids = {request.request_id for request in wave.requests}
        self._pool = [request for request in self._pool if request.request_id not in ids]
        self._frames -= sum(len(request.frame_plan.times) for request in wave.requests)
        self.history = self.history.with_issued(1)
        self._on_wave(wave)

    def _fill(self) -> None:
        while not self._full:
            if self._unchecked:
                self._check(self._unchecked.popleft())
            elif probed := self._probed.take():
                self._receive(probed)
            else:
                break
        if self._too_large and self._probed.closed and self.empty and not self._any_fits:
            raise UsageError(self._too_large[-1].error.message)

    def _receive(self, probed: Sequence[ProbedRequest]) -> None:
        for request in probed:
            if isinstance(request, FailedRequest):
                self._on_failed(request)
            else:
                self._unchecked.append(request)

    def _check(self, request: PlannedRequest) -> None:
        """Pools a request, or fails it if it is too large for the device. Failures are withheld
        until some request fits: if none does, the job itself is wrong."""
        assert self.profile is not None
        if error := Capacity(self.profile, self.config).misfit(request):
            self._too_large.append(request.failed(error))
        else:
            self._any_fits = True
            self._pool.append(request)
            self._frames += len(request.frame_plan.times)
        if self._any_fits:
            for failed in self._too_large:
                self._on_failed(failed)
            self._too_large = []


def split_by_capacity(
    requests: Sequence[PlannedRequest], capacity: Capacity
) -> tuple[list[PlannedRequest], list[FailedRequest]]:
    """The requests that fit the device, and those that fail because they do not.

    Raises:
        UsageError: there are requests and none fits.
    """
    fitting: list[PlannedRequest] = []
    failed: list[FailedRequest] = []
    for request in requests:
        if error := capacity.misfit(request):
            failed.append(request.failed(error))
        else:
            fitting.append(request)
    if failed and not fitting:
        raise UsageError(failed[-1].error.message)
    return fitting, failed
