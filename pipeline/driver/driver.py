"""The driver: one loop in one thread, which alone changes the run's state (`state.RunState`).

Every iteration starts the decode tasks and feeds that the limits allow, waits for futures, handles
all that are ready, and checks timeouts. The package's docstring follows a request through the
driver. Engines and decode tasks are behind `backend.Backend`; this module does not depend on Ray.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

from pipeline.config import Job
from pipeline.driver import decode_queue, feeder
from pipeline.driver.backend import (
    OBJECT_LOST,
    Backend,
    Future,
    WaveSource,
    WorkerLost,
)
from pipeline.driver.state import (
    DEFAULT_LIMITS,
    DecodeGroup,
    DriverLimits,
    EngineState,
    FedRequest,
    InFlightRequest,
    Replica,
    RunningDecode,
    RunningFeed,
    RunState,
    decode_groups,
)
from pipeline.driver.suspects import SuspectGroup
from pipeline.records import (
    RESUME_HINT,
    CompletedRequest,
    EngineConfig,
    Frames,
    Interrupted,
    PlannedRequest,
    RequestError,
    RunError,
    RunSnapshot,
)
from std_core.types import Result

MAX_DECODE_ATTEMPTS = 3  # decode tasks per video whose process dies
MAX_IDLE_DEATHS = 3  # engines in a row that die without a request
MAX_FIRST_BLAMED = 3  # blamed requests before any other request is completed

STEP_SECONDS = 1.0  # longest wait for a future
IDLE_STEP_SECONDS = 0.05  # the same while the next wave is not planned yet
HEARTBEAT_SECONDS = 1.0  # between two heartbeats of an engine
DRAIN_SECONDS = 20.0  # that engines may go on after a signal
PAUSE_SECONDS = 5.0  # between two health checks, above which the driver itself was blocked

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Driver:
    """Runs all requests of a source of waves and calls `on_completed` once for each.

    Args:
        on_completed: gets each request once.
        on_snapshot: gets the run's counts after every step.
        on_step: called after every step, also while engines drain.
        engines: replicas to run.
        max_frame_bytes: bound of the frames that are decoding or kept.
        max_model_len: limit of a request's context and text together, in tokens.
        clock: monotonic time in seconds.
    """

    job: Job
    _: KW_ONLY
    waves: WaveSource
    backend: Backend
    on_completed: Callable[[CompletedRequest], None]
    on_snapshot: Callable[[RunSnapshot], None]
    on_step: Callable[[], None]
    engines: int
    max_frame_bytes: int
    max_model_len: int
    limits: DriverLimits = DEFAULT_LIMITS
    clock: Callable[[], float] = time.monotonic
    state: RunState = field(init=False)

    def __post_init__(self) -> None:
        now = self.clock()
        replicas = [Replica(index, self.job.max_num_seqs) for index in range(self.engines)]
        self.state = RunState(replicas, progress_at=now, checked_at=now)

    # ------------------------------------------------------------------------------------ the loop

    def run(self, signals: list[int]) -> None:
        """Run until every request is completed.

        Args:
            signals: a list to which signal handlers append the numbers of SIGINT and SIGTERM.

        Raises:
            RunError: a signal arrived, engines do not start, or nothing makes progress.
        """
        for replica in self.state.replicas:
            self._start_engine(replica)
        while not self._finished:
            if signals:
                self._drain(signals)
                number = signal.Signals(signals[0])
                raise Interrupted(f"stopped by {number.name}; {RESUME_HINT}", number)
            self._start_decodes()
            for replica in self.state.replicas:
                self._recycle(replica)
                self._feed(replica)
            self._step()
            self.on_snapshot(self.state.snapshot())

    def close(self) -> None:
        """Kill all engines and decode tasks, so that their resources are free at once."""
        for future in self.state.decodes:
            self.backend.cancel(future)
        for replica in self.state.replicas:
            if replica.engine.handle is not None:
                self.backend.kill(replica.engine.handle)

    @property
    def _finished(self) -> bool:
        return self._all_decoded and not self.state.in_flight

    @property
    def _all_decoded(self) -> bool:
        """Whether every group was decoded once or is being decoded."""
        undecoded = any(replica.undecoded for replica in self.state.replicas)
        return self.waves.closed and not undecoded

    def _drain(self, signals: list[int]) -> None:
        """Let engines finish their requests, until another signal arrives or the time is over."""
        deadline = self.clock() + DRAIN_SECONDS
        received = len(signals)
        while (
            any(replica.engine.requests for replica in self.state.replicas)
            and self.clock() < deadline
            and len(signals) == received
        ):
            self._step()

    def _step(self) -> None:
        """Handle all futures that are ready, after waiting for the first; check timeouts."""
        futures = [*self.state.decodes, *self.state.feeds]
        for replica in self.state.replicas:
            futures += replica.engine.futures()
        waits_for_waves = not self._all_decoded and not self.state.decodes
        seconds = IDLE_STEP_SECONDS if waits_for_waves else STEP_SECONDS
        for future in self.backend.wait(futures, seconds):
            self._handle(future)
        self._check_health()
        self.on_step()

    def _handle(self, future: Future) -> None:
        if future in self.state.decodes:
            self._finish_decode(future)
            return
        if future in self.state.feeds:
            self._finish_feed(future)
            return
        for replica in self.state.replicas:
            engine = replica.engine
            if future in engine.starting:
                self._finish_start(replica, future)
            elif future in engine.other_ranks:
                self._finish_rank(replica, future)
            elif future == engine.heartbeat:
                self._finish_heartbeat(engine)
            elif future is engine.results:
                self._take_result(replica)
        # else it belongs to an engine that was replaced in this step

    def _note_progress(self) -> None:
        self.state.progress_at = self.clock()

    # -------------------------------------------------------------------------------- decode tasks

    def _start_decodes(self) -> None:
        """Start all decode tasks that the limits allow."""
        while self._start_next_decode():
            self._note_progress()

    def _start_next_decode(self) -> bool:
        replica = decode_queue.least_loaded(self.state.replicas)
        if not decode_queue.may_decode_ahead(self.state, replica, self.limits):
            return False
        if not replica.undecoded:
            wave = self.waves.take(engine_idle=not replica.ahead)
            if wave is not None:
                replica.undecoded.extend(decode_groups(wave))
        choice = decode_queue.next_decode(self.state, replica, self.max_frame_bytes)
        if choice is None:
            return False
        group, source = choice
        source.undecoded.remove(group)
        self._keep_frames(group)
        for request in group.requests:
            self.state.in_flight[request.request_id] = InFlightRequest(request, group)
        self._start_decode(group, replica, list(group.requests))
        return True

    def _start_decode(
        self, group: DecodeGroup, replica: Replica, waiting: list[PlannedRequest]
    ) -> None:
        """Start a decode task; the replica gets the waiting requests of the group afterwards."""
        info = group.requests[0].info
        call = self.backend.decode(info, group.frame_plan, replica.engine.node)
        group.pixels = None
        group.attempts += 1
        replica.decoding += len(waiting)
        self.state.decodes[call.frames] = RunningDecode(group, replica, waiting, call.pixels)

    def _decode_again(
        self, group: DecodeGroup, replica: Replica, waiting: list[PlannedRequest]
    ) -> None:
        """Start to decode frames that were lost, unless that is under way."""
        for decode in self.state.decodes.values():
            if decode.group is group:
                decode.replica.decoding += len(waiting)
                decode.waiting += waiting
                return
        self._start_decode(group, replica, waiting)

    def _finish_decode(self, future: Future) -> None:
        decode = self.state.decodes.pop(future)
        group = decode.group
        decode.replica.decoding -= len(decode.waiting)
        self._note_progress()
        frames = self._decoded_frames(future)
        if isinstance(frames, RequestError) and frames.code == "decode_crashed":
            group.crashes += 1
            # the video may not be the cause: the process may have been killed from outside
            if group.crashes < MAX_DECODE_ATTEMPTS:
                self._start_decode(group, decode.replica, decode.waiting)
                return
        self.state.decoded_videos += 1
        if isinstance(frames, RequestError):
            errors = {request.frames_key: frames for request in group.requests}
        else:
            errors = group.store(frames, decode.pixels)
        decode.replica.decoded.extend(r for r in decode.waiting if r.frames_key not in errors)
        self._fail_undecodable(group, errors)

    def _decoded_frames(self, future: Future) -> Frames | RequestError:
        try:
            frames: Frames | RequestError = self.backend.get(future)
        except WorkerLost as lost:
            return RequestError(lost.decode_error_code, f"decoding failed: {lost.reason}")
        return frames

    def _fail_undecodable(self, group: DecodeGroup, errors: dict[str, RequestError]) -> None:
        """Complete requests whose frames cannot be decoded, except those in an engine."""
        in_engine = set().union(*(replica.engine.requests for replica in self.state.replicas))
        for request in group.requests:
            request_id = request.request_id
            error = errors.get(request.frames_key)
            is_waiting = request_id in self.state.in_flight and request_id not in in_engine
            if error is not None and is_waiting:
                self.state.suspects.drop([request_id])
                self._complete(_error_result(request_id, error))

    def _keep_frames(self, group: DecodeGroup) -> None:
        self.state.frame_bytes += group.nbytes
        self.state.peak_frame_bytes = max(self.state.frame_bytes, self.state.peak_frame_bytes)

    def _release_frames(self, group: DecodeGroup) -> None:
        self.state.frame_bytes -= group.nbytes
        group.pixels = None

    # --------------------------------------------------------------------------------------- feeds

    def _feed(self, replica: Replica) -> None:
        """Feed suspects to an engine if some wait and it is empty, else decoded requests."""
        engine = replica.engine
        if not engine.running or engine.trial is not None or self._is_retiring(engine):
            return
        suspects = None if engine.requests else self._next_trial(replica)
        if suspects is not None:
            self._feed_suspects(replica, suspects)
        else:
            self._feed_decoded(replica)

    def _feed_suspects(self, replica: Replica, suspects: SuspectGroup) -> None:
        tracked = [self.state.in_flight[request_id] for request_id in suspects.requests]
        replica.engine.trial = suspects
        self._use_config(replica.engine, replica.within_slots(tracked[0].group.config))
        self._send(replica, [member.request for member in tracked])

    def _feed_decoded(self, replica: Replica) -> None:
        choice = feeder.next_feed(self.state, replica, self.limits)
        self._remove_from_queues(replica, choice.taken)
        for request in choice.undecoded:
            group = self.state.in_flight[request.request_id].group
            self._decode_again(group, replica, [request])
        if choice.requests:
            self._use_config(replica.engine, choice.config)
            self._send(replica, choice.requests)

    def _next_trial(self, replica: Replica) -> SuspectGroup | None:
        """Take the next suspects whose frames are decoded; decode those of skipped groups."""
        if self.state.is_being_fed(replica.engine):
            return None
        for _ in range(len(self.state.suspects.waiting)):
            suspects = self.state.suspects.take()
            assert suspects is not None
            groups = feeder.groups_without_frames(self.state, suspects)
            if not groups:
                return suspects
            for group in groups:
                self._decode_again(group, replica, [])
            self.state.suspects.postpone(suspects)
        return None

    def _remove_from_queues(self, replica: Replica, count: int) -> None:
        for queue in feeder.sources(self.state, replica):
            while queue and count:
                queue.popleft()
                count -= 1

    def _use_config(self, engine: EngineState, config: EngineConfig | None) -> None:
        if config != engine.config:
            engine.config = config
            # if nothing has arrived with the previous config, its index is used again
            engine.config_index += int(engine.config_arrived)
            engine.config_arrived = False

    def _send(self, replica: Replica, requests: list[PlannedRequest]) -> None:
        engine = replica.engine
        if not engine.requests:
            engine.progress_at = self.clock()
        batches = feeder.batches(
            self.state, replica, requests, job=self.job, max_model_len=self.max_model_len
        )
        for batch in batches:
            request_ids = [request.request_id for request in batch.requests]
            for request_id in request_ids:
                tracked = self.state.in_flight[request_id]
                tracked.engines += 1
                engine.requests[request_id] = FedRequest(tracked.request, batch.config)
            future = self.backend.feed(engine.handle, batch)
            self.state.feeds[future] = RunningFeed(replica, engine, request_ids, batch.pixels)

    def _finish_feed(self, future: Future) -> None:
        feed = self.state.feeds.pop(future)
        try:
            self.backend.get(future)
            feed.engine.config_arrived = True
        except WorkerLost as lost:
            # the stream of results reports the death of an engine
            if lost.code == OBJECT_LOST and feed.replica.engine is feed.engine:
                self._take_back(feed)

    def _take_back(self, feed: RunningFeed) -> None:
        """Queue requests again whose frames were lost before they reached the engine."""
        engine = feed.engine
        request_ids = [one for one in feed.request_ids if one in engine.requests]
        requests = [engine.requests.pop(request_id).request for request_id in request_ids]
        for request_id in request_ids:
            group = self.state.in_flight[request_id].group
            if group.pixels is feed.pixels:
                group.pixels = None
        if engine.trial is not None and request_ids:
            deaths = engine.trial.deaths_alone if len(engine.trial.requests) == 1 else 0
            self.state.suspects.put_back(SuspectGroup(tuple(request_ids), deaths))
        else:
            feed.replica.decoded.extendleft(reversed(requests))
        self._end_trial(engine)

    def _end_trial(self, engine: EngineState) -> None:
        """End a trial whose suspects have all left the engine."""
        if not engine.requests:
            engine.trial = None

    # ------------------------------------------------------------------------------------- engines

    def _start_engine(self, replica: Replica) -> None:
        start = self.backend.start(replica.slots)
        replica.engine = EngineState(start.handle, list(start.ready))

    def _replace_engine(self, replica: Replica) -> None:
        self.backend.kill(replica.engine.handle)
        self._start_engine(replica)

    def _recycle(self, replica: Replica) -> None:
        """Replace an engine that has completed its share of requests and is empty."""
        if self._is_retiring(replica.engine) and not replica.engine.requests:
            self._replace_engine(replica)

    def _is_retiring(self, engine: EngineState) -> bool:
        return engine.completed >= self.limits.requests_per_engine

    def _finish_start(self, replica: Replica, future: Future) -> None:
        """Mark a rank as ready; run the engine once all are."""
        engine = replica.engine
        try:
            node = self.backend.get(future)
        except WorkerLost as lost:
            self._lose_engine(replica, lost, " while it started")
            return
        engine.node = engine.node or node
        engine.starting.remove(future)
        if not engine.starting:
            streams = self.backend.run(engine.handle)
            engine.results = streams.results
            engine.other_ranks = streams.other_ranks
        engine.progress_at = self.clock()
        self._note_progress()

    def _finish_rank(self, replica: Replica, future: Future) -> None:
        """Replace an engine of which one rank has ended."""
        lost = WorkerLost("worker_killed", "one of its ranks ended")
        try:
            self.backend.get(future)
        except WorkerLost as error:
            lost = error
        self._lose_engine(replica, lost)

    def _finish_heartbeat(self, engine: EngineState) -> None:
        future = engine.heartbeat
        engine.heartbeat = None
        try:
            counter = self.backend.get(future)
        except WorkerLost:
            return  # the stream of results reports the death of an engine
        if counter != engine.progress_counter:
            engine.progress_counter = counter
            engine.progress_at = self.clock()
            self._note_progress()

    def _take_result(self, replica: Replica) -> None:
        engine = replica.engine
        try:
            result = self.backend.next_result(engine.results)
        except WorkerLost as lost:
            self._lose_engine(replica, lost)
            return
        engine.progress_at = self.clock()
        fed = engine.requests.pop(result.request_id, None)
        if fed is not None:
            engine.completed += 1
            self.state.idle_deaths = 0
            self._complete(result, fed.config)
        self._end_trial(engine)

    # -------------------------------------------------------------------------- completed requests

    def _complete(self, result: Result, config: EngineConfig | None = None) -> None:
        """Report a request with its result and remove it from the state.

        Args:
            config: with which it ran; None if the driver itself made the result.
        """
        tracked = self.state.in_flight.pop(result.request_id)
        group = tracked.group
        self.state.completed += 1
        self._note_progress()
        group.incomplete -= 1
        if not group.incomplete:
            self._release_frames(group)
        progress = group.wave_progress
        progress.incomplete -= 1
        if config == progress.wave.engine_config:
            progress.results.append(result)
        if not progress.incomplete:
            self.waves.complete(progress.wave, progress.results)
        self.on_completed(
            CompletedRequest(
                tracked.request,
                frames=group.frames_of(tracked.request),
                result=result,
                attempts=tracked.engines or group.attempts,
                draft=(config or progress.wave.engine_config).draft,
            )
        )

    # ------------------------------------------------------------------------------------ failures

    def _lose_engine(self, replica: Replica, lost: WorkerLost, when: str = "") -> None:
        """Replace an engine that died and run its requests again.

        Raises:
            RunError: engines keep dying, whatever their requests are.
        """
        engine = replica.engine
        reason = lost.reason + when
        slots = replica.slots if engine.config is None else engine.config.max_num_seqs
        self.state.deaths += 1
        if lost.code == "out_of_memory" and slots > 1:
            reason += f"; from now on {slots // 2} rows at a time"
            self._limit_slots(slots // 2)
            self._replace_engine(replica)
            self._requeue(replica, engine)
        else:
            self._replace_engine(replica)
            request_ids = tuple(engine.requests)
            culprit = self.state.suspects.add_after_death(request_ids, engine.trial)
            if culprit is not None:
                self._blame(culprit, lost.engine_error_code, reason)
        self.state.idle_deaths = 0 if engine.requests else self.state.idle_deaths + 1
        if self.state.idle_deaths >= MAX_IDLE_DEATHS:
            times = f"{self.state.idle_deaths} times in a row"
            raise RunError(f"the engine is gone: {reason}, {times}; {RESUME_HINT}")
        self.state.returned.extend(replica.decoded)
        replica.decoded.clear()
        count = len(engine.requests)
        logger.warning(
            "engine %d is replaced: %s; %d requests run again", replica.index, reason, count
        )

    def _requeue(self, replica: Replica, engine: EngineState) -> None:
        """Run the requests of an engine again that ran out of memory; none of them is suspect."""
        if engine.trial is not None and engine.requests:
            request_ids = tuple(engine.requests)
            self.state.suspects.put_back(replace(engine.trial, requests=request_ids))
        else:
            requests = [fed.request for fed in engine.requests.values()]
            replica.decoded.extendleft(reversed(requests))

    def _limit_slots(self, slots: int) -> None:
        """Limit the slots of all replicas: the planner's estimate of memory was too low."""
        self.waves.limit_slots(slots)
        for replica in self.state.replicas:
            replica.slots = min(replica.slots, slots)

    def _blame(self, culprit: str, code: str, reason: str) -> None:
        """Complete a request with an error because it ended its engines."""
        self.state.blamed += 1
        message = f"two engines that ran nothing but this request ended: {reason}"
        self._complete(_error_result(culprit, RequestError(code, message)))
        if self.state.blamed >= MAX_FIRST_BLAMED and self.state.blamed == self.state.completed:
            raise RunError(
                f"each of the first {self.state.blamed} requests ended its engine: {reason}; "
                f"{RESUME_HINT}"
            )

    def _check_health(self) -> None:
        """Request heartbeats; replace engines and end the run where progress has stopped.

        Raises:
            RunError: nothing made progress for `stall_timeout` seconds.
        """
        now = self.clock()
        self._discount_pause(now)
        for replica in self.state.replicas:
            engine = replica.engine
            if not engine.running or not engine.requests:
                continue
            if now - engine.progress_at > self.job.engine_timeout:
                reason = f"it made no progress for {self.job.engine_timeout:g} s"
                self._lose_engine(replica, WorkerLost("engine_timeout", reason))
            elif engine.heartbeat is None and now - engine.heartbeat_at > HEARTBEAT_SECONDS:
                engine.heartbeat_at = now
                engine.heartbeat = self.backend.heartbeat(engine.handle)
        if now - self.state.progress_at > self.job.stall_timeout:
            raise RunError(
                f"nothing made progress for {self.job.stall_timeout:g} s: "
                f"{self._describe_stall()}; {RESUME_HINT}"
            )

    def _discount_pause(self, now: float) -> None:
        """Exclude time in which the driver itself was blocked, for example by slow storage."""
        pause = now - self.state.checked_at
        self.state.checked_at = now
        if pause > PAUSE_SECONDS:
            self.state.progress_at += pause
            for replica in self.state.replicas:
                replica.engine.progress_at += pause

    def _describe_stall(self) -> str:
        """Which stages wait, and for what."""
        stages = []
        if self.state.decodes:
            stages.append(f"{len(self.state.decodes)} videos wait for a CPU to decode on")
        starting = [str(r.index) for r in self.state.replicas if not r.engine.running]
        if starting:
            stages.append(f"engine {', '.join(starting)} waits for its start")
        if not self._all_decoded:
            stages.append("the next headers are being read")
        return "; ".join([*stages, self.backend.describe_resources()])


def _error_result(request_id: str, error: RequestError) -> Result:
    return Result(request_id, token_ids=[], text="", finish_reason="error", error=error)
