"""The driver's steps in a world without Ray, in which anything may fail at any time and the clock
is the test's."""

from __future__ import annotations

import math
import random
import signal
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.suites.shared.stubs import FixedWaves, stub_request
from pipeline.config import Job
from pipeline.driver import fleet as fleet_module
from pipeline.driver import replica as replica_module
from pipeline.driver.backend import WorkerLost
from pipeline.driver.decode_queue import Intake
from pipeline.driver.feeder import Handover
from pipeline.driver.fleet import Fleet
from pipeline.driver.replica import Replica
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

TIMEOUT = 50.0  # s, of engines


@dataclass(eq=False)
class Call:
    """A reference: what it names, and how many looks it takes until that is there."""

    value: Any
    left: int


@dataclass(eq=False)
class Engine:
    """Rows leave in any order; prompts may kill or stop it."""

    slots: int
    turn: int = 0
    setup: EngineConfig | None = None
    lines: dict[int, deque[tuple[Request, EngineConfig]]] = field(default_factory=dict)
    ran: dict[str, EngineConfig] = field(
        default_factory=dict
    )  # what every request ran with last, in whichever engine
    seated: list[Request] = field(default_factory=list)
    out: deque[Result | WorkerLost] = field(default_factory=deque)
    steps: int = 0
    over: bool = False
    others: list[Call] = field(default_factory=list)  # of its other ranks
    peers: set[str] = field(default_factory=set)  # everybody it was ever handed

    def step(self, rng: random.Random, memory: int) -> None:
        if self.over:
            return
        line = self.lines.get(self.turn, deque())
        if not line and not self.seated and self.turn + 1 in self.lines:
            self.turn += 1
            return
        while line and len(self.seated) < line[0][1].max_num_seqs:
            request, setup = line.popleft()
            self.seated.append(request)
            self.ran[request.request_id] = setup
        assert len({self.ran[r.request_id] for r in self.seated}) <= 1  # one turn after the other
        prompts = [request.prompt for request in self.seated]
        if "hang" in prompts or not self.seated:
            return
        self.steps += 1
        if len(self.seated) > memory:
            self.end(WorkerLost("out_of_memory", "full"))
        elif "kill" in prompts and rng.random() < 0.7:
            self.end(WorkerLost("worker_killed", "killed"))
        elif (
            rng.random() < 0.5
            and (done := self.seated[rng.randrange(len(self.seated))]).prompt == "?"
        ):
            self.seated.remove(done)
            self.out.append(Result(done.request_id, [1], "text", "stop"))

    def end(self, gone: WorkerLost) -> None:
        self.over = True
        self.out.append(gone)


class World:
    """`Backend` of it. What fails besides what prompts do: engines at a rate, decoders and frames in
    transit, each video once at most, so that no innocent can be blamed."""

    def __init__(
        self,
        seed: int,
        kills: int = 0,
        decode_faults: float = 0.0,
        memory: int = 1 << 30,
        ranks: int = 1,
    ):
        self.ranks = ranks
        self.rng = random.Random(seed)
        self.kills = kills
        self.faults = decode_faults
        self.memory = memory
        self.now = 0.0
        self.ran: dict[str, EngineConfig] = {}
        self.engines: list[Engine] = []
        self.spoilt: Counter[str] = Counter()
        self.most_held = 0

    def monotonic(self) -> float:
        return self.now

    def _call(self, value: Any) -> Call:
        return Call(value, self.rng.randrange(4))

    def _unlucky(self, name: str) -> bool:
        """At most once each."""
        if self.spoilt[name] or self.rng.random() >= self.faults:
            return False
        self.spoilt[name] += 1
        return True

    def decode(self, info: VideoInfo, plan: FramePlan, node: str | None) -> tuple[Call, str]:
        if self._unlucky(f"decode {info.uri}"):
            return self._call(WorkerLost("decode_crashed", "killed")), ""
        return self._call(
            Frames(None, pts=plan.times, fps=1.0, frames_lost=0, rotation=0, decoder="none")
        ), f"pixels of {info.uri}"  # type: ignore[arg-type]

    def start(self, slots: int) -> tuple[Engine, list[Call]]:
        self.engines.append(Engine(slots, ran=self.ran))
        return self.engines[-1], [self._call("node") for _ in range(self.ranks)]

    def run(self, engine: Engine) -> tuple[Engine, list[Call]]:
        engine.others = [Call(None, 1 << 60) for _ in range(self.ranks - 1)]
        return engine, engine.others

    def feed(
        self,
        engine: Engine,
        requests: list[Request],
        pixels: str,
        numbers: list[Any],
        turn: int,
        setup: EngineConfig,
    ) -> Call:
        assert pixels and not {r.request_id for r in requests} & engine.peers
        assert turn >= max(engine.lines, default=0) and len(numbers) == len(requests)
        if self._unlucky(f"feed {pixels}"):
            return self._call(WorkerLost("lost", "its machine is gone"))
        engine.peers.update(r.request_id for r in requests)
        engine.lines.setdefault(turn, deque()).extend((request, setup) for request in requests)
        waiting = sum(len(line) for line in engine.lines.values())
        self.most_held = max(self.most_held, waiting + len(engine.seated))
        return self._call(None)

    def pulse(self, engine: Engine) -> Call:
        return self._call(engine.steps)

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        running = [engine for engine in self.engines if not engine.over and engine.seated]
        if running and self.kills and self.rng.random() < 0.02:
            self.kills -= 1
            victim = self.rng.choice(running)
            gone = WorkerLost("worker_killed", "killed from outside")
            if victim.others:  # it then waits for its other rank
                victim.over = True
                victim.others[0].value = gone
                victim.others[0].left = 0
            else:
                victim.end(gone)
        for engine in self.engines:
            engine.step(self.rng, self.memory)
        ready = []
        for reference in references:
            if isinstance(reference, Engine):
                ready += [reference] if reference.out else []
            else:
                reference.left -= 1
                ready += [reference] if reference.left < 0 else []
        self.now += 0.01 if ready else seconds
        return ready

    def get(self, reference: Call) -> Any:
        assert reference.left < 0
        if isinstance(reference.value, WorkerLost):
            raise reference.value
        return reference.value

    def following(self, stream: Engine) -> Result:
        found = stream.out.popleft()
        if isinstance(found, WorkerLost):
            raise found
        return found

    def kill(self, engine: Engine) -> None:
        engine.over = True

    def cancel(self, reference: Call) -> None:
        reference.value = None

    def free(self) -> str:
        return "free in the cluster: nothing"


class Run:
    """A fleet in a world, and what it handed on."""

    def __init__(
        self,
        world: World,
        requests: list[PlannedRequest],
        slots: int,
        replicas: int,
        bound: int = 1 << 40,
    ):
        self.requests = requests
        self.world = world
        self.rows: list[CompletedRequest] = []
        self.snapshots: list[RunSnapshot] = []
        job = Job(max_num_seqs=slots, engine_timeout=TIMEOUT, stall_timeout=400.0)
        self.waves = FixedWaves(requests, slots, size=7)
        drafts = [None, Draft(gamma=2), Draft(gamma=3)]
        for number, wave in enumerate(
            list(self.waves.waves)
        ):  # in setups of their own, neighbours at times alike
            draft = drafts[number // 2 % 3]
            count = max(1, slots - number % 2)
            gamma_schedule = GammaSchedule(((0,), (draft.gamma, number)), 0.5) if draft else None
            self.waves.waves[number] = Wave(
                wave.requests,
                count,
                draft,
                (DraftOption(draft, count, gamma_schedule=gamma_schedule),),
            )
        self.setups = {
            r.request_id: wave.engine_config for wave in self.waves.waves for r in wave.requests
        }
        places = [Replica(number, slots) for number in range(replicas)]
        intake = Intake(world, self.waves, places, bound)
        handover = Handover(job, max_model_len=4096, backend=world, replicas=places, intake=intake)
        self.fleet = Fleet(
            job,
            waves=self.waves,
            emit=self.rows.append,
            tick=lambda: None,
            notice=self.snapshots.append,
            backend=world,
            replicas=places,
            intake=intake,
            handover=handover,
        )

    def go(self, stopped: list[int] | None = None) -> Run:
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(monotonic=self.world.monotonic)
            patch.setattr(fleet_module, "time", clock)
            patch.setattr(replica_module, "time", clock)
            for replica in self.fleet.replicas:
                replica.alive = 0.0
            self.fleet.moved = self.fleet.looked = 0.0
            try:
                self.fleet.run([] if stopped is None else stopped)
            finally:
                self.fleet.close()
        assert Counter(a.request.request_id for a in self.rows) == Counter(
            r.request_id for r in self.requests
        )
        assert sorted(len(wave.requests) for wave, _ in self.waves.answered) == sorted(
            len(self.requests[i : i + 7]) for i in range(0, len(self.requests), 7)
        )
        for answer in self.rows:
            if not answer.result.error:
                ran = self.world.ran[answer.request.request_id]
                assert ran.draft == answer.draft
                if ran == (own := self.setups[answer.request.request_id]):
                    assert ran.gamma_schedule == own.gamma_schedule
                elif ran.gamma_schedule is not None:  # a suspect among those of another wave
                    assert ran.draft is not None and ran.gamma_schedule.max_gamma <= ran.draft.gamma
        assert (
            self.fleet.intake.nbytes == 0
            and not self.fleet.handover.open
            and not self.fleet.handover.suspects.waiting
        )
        assert all(engine.over for engine in self.world.engines)
        return self

    @property
    def blamed(self) -> dict[str, str]:
        return {a.request.request_id: a.result.error.code for a in self.rows if a.result.error}


def archive(rng: random.Random, count: int, bad: dict[int, str]) -> list[PlannedRequest]:
    """Requests, several on a video, some of which do harm."""
    video = 0
    requests = []
    for number in range(count):
        video += rng.random() < 0.5
        requests.append(
            stub_request(number, bad.get(number, "?"), f"/v/{video}.mp4", 1 + video % 3)
        )
    return requests


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.integers(1, 5), st.integers(1, 3), st.data())
def test_whatever_fails_every_request_comes_out_once_and_only_culprits_are_blamed(
    seed: int, count: int, slots: int, replicas: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=3, unique=True))
    bad = {place: data.draw(st.sampled_from(["kill", "hang"])) for place in places}
    requests = archive(random.Random(seed), count, bad)
    world = World(seed, decode_faults=0.2)
    bound = data.draw(st.sampled_from([1, 10 * 56 * 56 * 3, 1 << 40]))
    run = Run(world, requests=requests, slots=slots, replicas=replicas, bound=bound)
    run.fleet.answered = 1  # else three culprits that come before all others would end the run
    run.go()
    codes = {"kill": "worker_killed", "hang": "engine_timeout"}
    assert run.blamed == {f"{place:032x}": codes[what] for place, what in bad.items()}
    assert run.fleet.deaths <= len(bad) * (4 + math.ceil(math.log2(slots)))
    assert world.most_held <= max(replica_module.HELD * slots, 1)
    largest = max(len(r.frame_plan.times) for r in requests) * 56 * 56 * 3
    assert run.fleet.intake.most_nbytes <= max(bound, largest)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 80),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_kills_from_outside_blame_nobody(
    seed: int, count: int, slots: int, replicas: int, ranks: int
) -> None:
    """Two of them: a request would have to be hit three times."""
    world = World(seed, kills=2, decode_faults=0.3, ranks=ranks)
    run = Run(world, archive(random.Random(seed), count, {}), slots, replicas).go()
    assert run.blamed == {} and run.fleet.deaths <= 2
    assert sum(a.attempts - 1 for a in run.rows) >= (run.fleet.deaths > 0)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_a_full_memory_halves_the_slots_until_what_runs_fits(
    seed: int, count: int, slots: int, memory: int
) -> None:
    run = Run(World(seed, memory=memory), archive(random.Random(seed), count, {}), slots, 1).go()
    assert run.blamed == {}
    assert run.fleet.deaths <= max(0, math.ceil(math.log2(slots / memory)))
    assert min(replica.slots for replica in run.fleet.replicas) >= min(slots, memory / 2)


def test_what_does_not_fit_alone_is_out_of_memory() -> None:
    run = Run(World(1, memory=0), archive(random.Random(1), 2, {}), 4, 1).go()
    assert set(run.blamed.values()) == {"out_of_memory"}


def test_every_request_that_ends_its_engine_ends_the_run() -> None:
    with pytest.raises(
        RunError, match=r"each of the first 3 requests ended its engine: killed; .*resumes"
    ):
        Run(World(0), archive(random.Random(0), 20, dict.fromkeys(range(20), "kill")), 2, 2).go()


def test_engines_are_replaced_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RECYCLE", 10)
    run = Run(World(3), archive(random.Random(3), 60, {}), 2, 2).go()
    assert len(run.world.engines) >= 6 and run.fleet.deaths == 0
    assert {a.attempts for a in run.rows} == {1}


def test_a_lane_without_an_engine_leaves_its_work_to_the_others() -> None:
    world = World(5)
    start = world.start
    world.start = lambda slots: (
        start(slots) if len(world.engines) != 1 else (start(slots)[0], [Call("late", 10**9)])
    )  # type: ignore[method-assign]
    run = Run(world, archive(random.Random(5), 40, {}), 2, 2).go()
    assert not run.blamed and len(world.engines[0].peers) == 40


def test_a_signal_lets_engines_finish_what_they_hold() -> None:
    world = World(7)
    stopped = []
    run = Run(world, archive(random.Random(7), 60, {}), 3, 1)
    notice = run.fleet.notice
    run.fleet.notice = lambda snapshot: (
        notice(snapshot),
        len(run.rows) > 4 and stopped.append(signal.SIGTERM),
    )  # type: ignore[assignment, func-returns-value]
    with pytest.raises(RunError, match=r"stopped by SIGTERM; .*resumes"):
        run.go(stopped)
    assert 5 <= len(run.rows) < 60
    assert {a.request.request_id for a in run.rows} == world.engines[0].peers


def test_a_stall_names_what_waits() -> None:
    world = World(9)
    world.start = lambda slots: (Engine(slots), [Call("never", 10**9)])  # type: ignore[method-assign]
    with pytest.raises(
        RunError, match=r"nothing has moved for 400 s: engine 0 waits for its start; free in the"
    ):
        Run(world, archive(random.Random(9), 3, {}), 1, 1).go()
    world = World(9)
    world.decode = lambda info, plan, node: (Call("never", 10**9), "")  # type: ignore[method-assign]
    with pytest.raises(RunError, match="1 videos wait for a CPU to decode on"):
        Run(world, archive(random.Random(9), 1, {}), 1, 1).go()


def test_a_driver_that_slept_does_not_take_its_engines_for_dead() -> None:
    world = World(11)
    run = Run(world, archive(random.Random(11), 30, {}), 2, 1)
    emit = run.fleet.emit
    slept = []

    def sleep(answer: CompletedRequest) -> None:
        emit(answer)
        if len(run.rows) == 10:
            slept.append(world.now)
            world.now += 10_000  # storage kept it waiting

    run.fleet.emit = sleep
    run.go()
    assert slept and run.fleet.deaths == 0


def test_an_undecodable_video_fails_its_requests_and_no_other() -> None:
    world = World(13)
    decode = world.decode
    refused = RequestError("decode_timeout", "it took too long")
    world.decode = lambda info, plan, node: (  # type: ignore[method-assign]
        (Call(refused, 0), "") if info.uri == "/v/3.mp4" else decode(info, plan, node)
    )
    requests = archive(random.Random(13), 30, {})
    run = Run(world, requests, 2, 2).go()
    of_it = {r.request_id for r in requests if r.info.uri == "/v/3.mp4"}
    assert of_it and run.blamed == dict.fromkeys(of_it, "decode_timeout")
