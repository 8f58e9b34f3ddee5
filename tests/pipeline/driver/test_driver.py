"""The driver without Ray: a simulated backend in which anything may fail, on a simulated clock."""

from __future__ import annotations

import math
import random
import signal
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.suites.shared.stubs import FixedWaves, stub_request
from pipeline.config import Job
from pipeline.driver.backend import (
    OBJECT_LOST,
    DecodeCall,
    EngineStart,
    EngineStreams,
    FeedBatch,
    WorkerLost,
)
from pipeline.driver.driver import Driver
from pipeline.driver.state import DEFAULT_LIMITS, DriverLimits
from pipeline.records import (
    CompletedRequest,
    DraftOption,
    EngineConfig,
    FramePlan,
    Frames,
    PlannedRequest,
    RequestError,
    RunError,
    RunSnapshot,
    VideoInfo,
    Wave,
)
from std_core.types import Draft, GammaSchedule, Request, Result

ENGINE_TIMEOUT = 50.0  # s
NEVER = 1 << 60  # polls
WAVE_SIZE = 7  # requests


@dataclass(eq=False)
class FakeFuture:
    """Resolves to `value` after `polls` calls of `FakeBackend.wait`."""

    value: Any
    polls: int


@dataclass(eq=False)
class FakeEngine:
    """Completes its rows in random order; prompts may kill it (`kill`) or stop it (`hang`).

    Attributes:
        queues: requests and their configs by config index.
        last_config: the config with which each request ran last, in any engine.
        rows: requests in the slots.
        output: results and the engine's end, not taken yet.
        fed: ids of all requests that it ever got.
    """

    slots: int
    last_config: dict[str, EngineConfig] = field(default_factory=dict)
    config_index: int = 0
    queues: dict[int, deque[tuple[Request, EngineConfig]]] = field(default_factory=dict)
    rows: list[Request] = field(default_factory=list)
    output: deque[Result | WorkerLost] = field(default_factory=deque)
    steps: int = 0
    dead: bool = False
    other_ranks: list[FakeFuture] = field(default_factory=list)
    fed: set[str] = field(default_factory=set)

    def step(self, rng: random.Random, memory: int) -> None:
        """Admit requests, then fail, complete one row, or do neither.

        Args:
            memory: rows above which the engine runs out of memory.
        """
        if self.dead:
            return
        queue = self.queues.get(self.config_index, deque())
        if not queue and not self.rows and self.config_index + 1 in self.queues:
            self.config_index += 1
            return
        while queue and len(self.rows) < queue[0][1].max_num_seqs:
            request, config = queue.popleft()
            self.rows.append(request)
            self.last_config[request.request_id] = config
        configs = {self.last_config[request.request_id] for request in self.rows}
        assert len(configs) <= 1, "rows with different configs ran together"
        prompts = [request.prompt for request in self.rows]
        if "hang" in prompts or not self.rows:
            return
        self.steps += 1
        if len(self.rows) > memory:
            self.die(WorkerLost("out_of_memory", "full"))
        elif "kill" in prompts and rng.random() < 0.7:
            self.die(WorkerLost("worker_killed", "killed"))
        elif rng.random() < 0.5:
            row = self.rows[rng.randrange(len(self.rows))]
            if row.prompt == "?":
                self.rows.remove(row)
                self.output.append(Result(row.request_id, [1], "text", "stop"))

    def die(self, lost: WorkerLost) -> None:
        self.dead = True
        self.output.append(lost)


class FakeBackend:
    """A backend whose parts fail at random.

    Args:
        kills: engines that are killed for no reason of their requests.
        fault_rate: probability that a decode task or a feed fails. Each video fails at most once in
            either, so that no request can be blamed without being guilty.
        memory: rows above which an engine runs out of memory.
        ranks: per engine.
    """

    def __init__(
        self,
        seed: int,
        kills: int = 0,
        fault_rate: float = 0.0,
        memory: int = 1 << 30,
        ranks: int = 1,
    ):
        self.rng = random.Random(seed)
        self.kills = kills
        self.fault_rate = fault_rate
        self.memory = memory
        self.ranks = ranks
        self.now = 0.0
        self.last_config: dict[str, EngineConfig] = {}
        self.engines: list[FakeEngine] = []
        self.faults: Counter[str] = Counter()
        self.max_in_engine = 0

    def monotonic(self) -> float:
        return self.now

    def _future(self, value: Any) -> FakeFuture:
        return FakeFuture(value, self.rng.randrange(4))

    def _fails(self, call: str) -> bool:
        if self.faults[call] or self.rng.random() >= self.fault_rate:
            return False
        self.faults[call] += 1
        return True

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> DecodeCall:
        if self._fails(f"decode {info.uri}"):
            return DecodeCall(self._future(WorkerLost("decode_crashed", "killed")), "")
        frames = Frames(
            None,  # type: ignore[arg-type]
            pts=plan.times,
            fps=1.0,
            frames_lost=0,
            rotation=0,
            decoder="none",
        )
        return DecodeCall(self._future(frames), f"pixels of {info.uri}")

    def start(self, slots: int) -> EngineStart:
        engine = FakeEngine(slots, self.last_config)
        self.engines.append(engine)
        return EngineStart(engine, [self._future("node") for _ in range(self.ranks)])

    def run(self, engine: FakeEngine) -> EngineStreams:
        engine.other_ranks = [FakeFuture(None, NEVER) for _ in range(self.ranks - 1)]
        return EngineStreams(engine, engine.other_ranks)

    def feed(self, engine: FakeEngine, batch: FeedBatch) -> FakeFuture:
        names = {request.request_id for request in batch.requests}
        assert batch.pixels
        assert not names & engine.fed, "an engine got a request twice"
        assert batch.config_index >= max(engine.queues, default=0)
        assert len(batch.pixel_indices) == len(batch.requests)
        if self._fails(f"feed {batch.pixels}"):
            return self._future(WorkerLost(OBJECT_LOST, "its machine is gone"))
        engine.fed |= names
        queue = engine.queues.setdefault(batch.config_index, deque())
        queue.extend((request, batch.config) for request in batch.requests)
        queued = sum(len(queue) for queue in engine.queues.values())
        self.max_in_engine = max(self.max_in_engine, queued + len(engine.rows))
        return self._future(None)

    def heartbeat(self, engine: FakeEngine) -> FakeFuture:
        return self._future(engine.steps)

    def wait(self, futures: list[Any], seconds: float) -> list[Any]:
        self._kill_some_engine()
        for engine in self.engines:
            engine.step(self.rng, self.memory)
        ready = []
        for future in futures:
            if isinstance(future, FakeEngine):
                ready += [future] if future.output else []
            else:
                future.polls -= 1
                ready += [future] if future.polls < 0 else []
        self.now += 0.01 if ready else seconds
        return ready

    def _kill_some_engine(self) -> None:
        running = [engine for engine in self.engines if not engine.dead and engine.rows]
        if not running or not self.kills or self.rng.random() >= 0.02:
            return
        self.kills -= 1
        victim = self.rng.choice(running)
        lost = WorkerLost("worker_killed", "killed from outside")
        if victim.other_ranks:  # rank 0 then waits for the dead rank for ever
            victim.dead = True
            victim.other_ranks[0].value = lost
            victim.other_ranks[0].polls = 0
        else:
            victim.die(lost)

    def get(self, future: FakeFuture) -> Any:
        assert future.polls < 0
        if isinstance(future.value, WorkerLost):
            raise future.value
        return future.value

    def next_result(self, results: FakeEngine) -> Result:
        result = results.output.popleft()
        if isinstance(result, WorkerLost):
            raise result
        return result

    def kill(self, engine: FakeEngine) -> None:
        engine.dead = True

    def cancel(self, decode: FakeFuture) -> None:
        decode.value = None

    def describe_resources(self) -> str:
        return "free in the cluster: nothing"


class Run:
    """A driver on a fake backend, and what it called back."""

    def __init__(
        self,
        backend: FakeBackend,
        requests: list[PlannedRequest],
        slots: int,
        replicas: int,
        *,
        max_frame_bytes: int = 1 << 40,
        limits: DriverLimits = DEFAULT_LIMITS,
    ):
        self.requests = requests
        self.backend = backend
        self.completed: list[CompletedRequest] = []
        self.snapshots: list[RunSnapshot] = []
        self.waves = waves_of_various_configs(requests, slots)
        self.configs = {
            request.request_id: wave.engine_config
            for wave in self.waves.waves
            for request in wave.requests
        }
        self.driver = Driver(
            Job(max_num_seqs=slots, engine_timeout=ENGINE_TIMEOUT, stall_timeout=400.0),
            waves=self.waves,
            backend=backend,
            on_completed=self.completed.append,
            on_snapshot=self.snapshots.append,
            on_step=lambda: None,
            engines=replicas,
            max_frame_bytes=max_frame_bytes,
            max_model_len=4096,
            limits=limits,
            clock=backend.monotonic,
        )

    @property
    def deaths(self) -> int:
        return self.driver.state.deaths

    @property
    def errors(self) -> dict[str, str]:
        """Error codes by request id."""
        return {
            completed.request.request_id: completed.result.error.code
            for completed in self.completed
            if completed.result.error
        }

    def go(self, signals: list[int] | None = None) -> Run:
        """Run to the end, and check what holds of every run."""
        try:
            self.driver.run([] if signals is None else signals)
        finally:
            self.driver.close()
        counts = Counter(completed.request.request_id for completed in self.completed)
        assert counts == Counter(request.request_id for request in self.requests)
        wave_sizes = sorted(len(wave.requests) for wave, _ in self.waves.completed)
        starts = range(0, len(self.requests), WAVE_SIZE)
        assert wave_sizes == sorted(len(self.requests[i : i + WAVE_SIZE]) for i in starts)
        for completed in self.completed:
            if not completed.result.error:
                self._check_config(completed)
        state = self.driver.state
        assert state.frame_bytes == 0 and not state.in_flight and not state.suspects.waiting
        assert all(engine.dead for engine in self.backend.engines)
        return self

    def _check_config(self, completed: CompletedRequest) -> None:
        """The request names the draft that ran, with a gamma schedule that fits it."""
        ran = self.backend.last_config[completed.request.request_id]
        own = self.configs[completed.request.request_id]
        assert ran.draft == completed.draft
        if ran == own:
            assert ran.gamma_schedule == own.gamma_schedule
        elif ran.gamma_schedule is not None:  # a suspect among those of another wave
            assert ran.draft is not None and ran.gamma_schedule.max_gamma <= ran.draft.gamma


def waves_of_various_configs(requests: list[PlannedRequest], slots: int) -> FixedWaves:
    """Waves that differ in draft, slots and gamma schedule; some differ in the schedule alone."""
    waves = FixedWaves(requests, slots, size=WAVE_SIZE)
    drafts = [None, Draft(gamma=2), Draft(gamma=3)]
    for number, wave in enumerate(list(waves.waves)):
        draft = drafts[number // 2 % 3]
        wave_slots = max(1, slots - number % 2)
        schedule = GammaSchedule(((0,), (draft.gamma, number)), 0.5) if draft else None
        option = DraftOption(draft, wave_slots, gamma_schedule=schedule)
        waves.waves[number] = Wave(wave.requests, wave_slots, draft, (option,))
    return waves


def requests_on_videos(
    rng: random.Random, count: int, harmful: dict[int, str] | None = None
) -> list[PlannedRequest]:
    """Requests, some of them about the same video.

    Args:
        harmful: prompts `kill` and `hang` by number of the request.
    """
    harmful = harmful or {}
    video = 0
    requests = []
    for number in range(count):
        video += rng.random() < 0.5
        prompt = harmful.get(number, "?")
        requests.append(stub_request(number, prompt, f"/v/{video}.mp4", frames=1 + video % 3))
    return requests


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.integers(1, 5), st.integers(1, 3), st.data())
def test_whatever_fails_every_request_is_completed_once_and_only_culprits_are_blamed(
    seed: int, count: int, slots: int, replicas: int, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, count - 1), max_size=3, unique=True))
    harmful = {number: data.draw(st.sampled_from(["kill", "hang"])) for number in numbers}
    requests = requests_on_videos(random.Random(seed), count, harmful)
    backend = FakeBackend(seed, fault_rate=0.2)
    bound = data.draw(st.sampled_from([1, 10 * 56 * 56 * 3, 1 << 40]))
    run = Run(backend, requests, slots, replicas, max_frame_bytes=bound)
    run.driver.state.completed = 1  # else three culprits before all other requests end the run
    run.go()
    codes = {"kill": "worker_killed", "hang": "engine_timeout"}
    assert run.errors == {f"{number:032x}": codes[prompt] for number, prompt in harmful.items()}
    assert run.deaths <= len(harmful) * (4 + math.ceil(math.log2(slots)))
    assert backend.max_in_engine <= max(DEFAULT_LIMITS.in_engine * slots, 1)
    largest = max(len(request.frame_plan.times) for request in requests) * 56 * 56 * 3
    assert run.driver.state.peak_frame_bytes <= max(bound, largest)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 80),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_two_kills_from_outside_blame_no_request(
    seed: int, count: int, slots: int, replicas: int, ranks: int
) -> None:
    """A request would have to be hit three times."""
    backend = FakeBackend(seed, kills=2, fault_rate=0.3, ranks=ranks)
    run = Run(backend, requests_on_videos(random.Random(seed), count), slots, replicas).go()
    assert run.errors == {} and run.deaths <= 2
    repeated = sum(completed.attempts - 1 for completed in run.completed)
    assert repeated >= (run.deaths > 0)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_out_of_memory_halves_the_slots_until_the_rows_fit(
    seed: int, count: int, slots: int, memory: int
) -> None:
    requests = requests_on_videos(random.Random(seed), count)
    run = Run(FakeBackend(seed, memory=memory), requests, slots, 1).go()
    assert run.errors == {}
    assert run.deaths <= max(0, math.ceil(math.log2(slots / memory)))
    fewest = min(replica.slots for replica in run.driver.state.replicas)
    assert fewest >= min(slots, memory / 2)


def test_a_request_that_does_not_fit_alone_is_out_of_memory() -> None:
    requests = requests_on_videos(random.Random(1), 2)
    run = Run(FakeBackend(1, memory=0), requests, 4, 1).go()
    assert set(run.errors.values()) == {"out_of_memory"}


def test_the_run_ends_if_every_request_ends_its_engine() -> None:
    requests = requests_on_videos(random.Random(0), 20, dict.fromkeys(range(20), "kill"))
    message = r"each of the first 3 requests ended its engine: killed; .*resumes"
    with pytest.raises(RunError, match=message):
        Run(FakeBackend(0), requests, 2, 2).go()


def test_engines_are_replaced_after_a_number_of_requests() -> None:
    requests = requests_on_videos(random.Random(3), 60)
    run = Run(FakeBackend(3), requests, 2, 2, limits=DriverLimits(requests_per_engine=10)).go()
    assert len(run.backend.engines) >= 6 and run.deaths == 0
    assert {completed.attempts for completed in run.completed} == {1}


def test_other_engines_do_the_work_of_a_replica_whose_engine_does_not_start() -> None:
    backend = FakeBackend(5)
    start = backend.start

    def start_all_but_the_second(slots: int) -> EngineStart:
        is_second = len(backend.engines) == 1
        started = start(slots)
        return EngineStart(started.handle, [FakeFuture("late", NEVER)]) if is_second else started

    backend.start = start_all_but_the_second  # type: ignore[method-assign]
    run = Run(backend, requests_on_videos(random.Random(5), 40), 2, 2).go()
    assert not run.errors and len(backend.engines[0].fed) == 40


def test_after_a_signal_engines_finish_their_requests() -> None:
    backend = FakeBackend(7)
    signals: list[int] = []
    run = Run(backend, requests_on_videos(random.Random(7), 60), 3, 1)

    def stop_after_five_requests(snapshot: RunSnapshot) -> None:
        if len(run.completed) > 4:
            signals.append(signal.SIGTERM)

    run.driver.on_snapshot = stop_after_five_requests
    with pytest.raises(RunError, match=r"stopped by SIGTERM; .*resumes"):
        run.go(signals)
    assert 5 <= len(run.completed) < 60
    assert {completed.request.request_id for completed in run.completed} == backend.engines[0].fed


def test_the_message_of_a_stall_names_the_stage_that_waits() -> None:
    backend = FakeBackend(9)
    never_ready = [FakeFuture("never", NEVER)]
    backend.start = lambda slots: EngineStart(FakeEngine(slots), never_ready)  # type: ignore[method-assign]
    message = r"nothing made progress for 400 s: engine 0 waits for its start; free in the cluster"
    with pytest.raises(RunError, match=message):
        Run(backend, requests_on_videos(random.Random(9), 3), 1, 1).go()

    backend = FakeBackend(9)
    never_decoded = DecodeCall(FakeFuture("never", NEVER), "")
    backend.decode = lambda info, plan, node: never_decoded  # type: ignore[method-assign]
    with pytest.raises(RunError, match="1 videos wait for a CPU to decode on"):
        Run(backend, requests_on_videos(random.Random(9), 1), 1, 1).go()


def test_time_in_which_the_driver_was_blocked_does_not_count_against_engines() -> None:
    backend = FakeBackend(11)
    run = Run(backend, requests_on_videos(random.Random(11), 30), 2, 1)
    pauses = []

    def pause_once(completed: CompletedRequest) -> None:
        run.completed.append(completed)
        if len(run.completed) == 10:
            pauses.append(backend.now)
            backend.now += 10_000  # as if storage were slow

    run.driver.on_completed = pause_once
    run.go()
    assert pauses and run.deaths == 0


def test_an_undecodable_video_fails_its_requests_and_no_other() -> None:
    backend = FakeBackend(13)
    decode = backend.decode
    error = RequestError("decode_timeout", "it took too long")

    def decode_all_but_one(info: VideoInfo, plan: FramePlan, node: str | None) -> DecodeCall:
        if info.uri == "/v/3.mp4":
            return DecodeCall(FakeFuture(error, 0), "")
        return decode(info, plan, node)

    backend.decode = decode_all_but_one  # type: ignore[method-assign]
    requests = requests_on_videos(random.Random(13), 30)
    run = Run(backend, requests, 2, 2).go()
    undecodable = {r.request_id for r in requests if r.info.uri == "/v/3.mp4"}
    assert undecodable and run.errors == dict.fromkeys(undecodable, "decode_timeout")
