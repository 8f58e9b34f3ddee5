"""The driver: videos are decoded a little ahead of the engines, requests handed over as their frames arrive, results
handed on as rows finish, engines that die replaced. Everything here is in one thread, so that every request is handed
on exactly once."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline import flow, frames
from pipeline.actors import Decode, EngineActor, Load, decode_video
from pipeline.config import ROOT, Job
from pipeline.flow import Lane, Status, Video
from pipeline.suspects import Group, Suspects
from pipeline.types import Frames, Planned, RequestError, RunError, Wave
from std_core.engine import Engine
from std_core.types import Draft, Request, Result

PROGRESS = 5.0  # s between two lines on standard error
BEAT = 1.0  # s between two questions to an engine how far it is
DRAIN = 20.0  # s that engines may go on after SIGTERM
RECYCLE = 10_000  # requests that an engine answers before another takes its place: what leaks is given back
STARTS = 3  # engines in a row that end before anything is answered, beyond what suspects explain
DECODES = 2  # tries at a video whose decoding process dies
RESUMES = "what is finished is written, and the same command resumes"

Emit = Callable[[Planned, Frames | None, Result, int], None]


class Waves(Protocol):
    """Where waves come from, as they are made; `pipeline.ahead.Ahead` is one."""

    @property
    def closed(self) -> bool:
        """Whether all were taken."""

    def take(self) -> Wave | None:
        """The next one, if there is one by now."""


def drive(
    job: Job,
    draft: Draft | None,
    waves: Waves,
    max_model_len: int,
    emit: Emit,
    *,
    tick: Callable[[], None] = lambda: None,
    notice: Callable[[Status], None] | None = None,
    load: Load = Engine.load,
    decode: Decode = frames.decode,
) -> int:
    """Runs the waves in their order.

    Args:
        max_model_len: context and text of a request together, in tokens.
        emit: gets every request once, with its frames' facts (None where they failed), its result, and how often it
            was handed to an engine (or, where it never was, decoded).
        tick: called often, between two calls of `emit`.
        notice: gets what is where, often; prints a line now and then if not given.
        load, decode: what stands for the engine and the decoder where the driver itself is looked at.

    Returns:
        How many videos were decoded.

    Raises:
        RunError: engines cannot start, nothing moves, the cluster is too small, or SIGINT or SIGTERM arrived.
    """
    with cluster(job), _signals() as stopped:
        count, options, settings = engine_share(job)
        for name in ("dtype", "strict", "pipeline_parallel_size"):
            settings[name] = getattr(job, name)
        made = _Made(load, decode, options, settings)
        fleet = _Fleet(job, draft, waves, max_model_len, emit, tick, notice or _Printed(), made, job.max_num_seqs)
        try:
            fleet.lanes += [Lane(number, job.max_num_seqs) for number in range(count)]
            for lane in fleet.lanes:
                fleet.start(lane)
            fleet.run(stopped)
        finally:
            fleet.close()
        return fleet.decoded


@dataclass(frozen=True)
class _Made:
    """How engines and frames are made: by what, with which of Ray's options and the engine's settings."""

    load: Load
    decode: Decode
    options: dict[str, Any]
    settings: dict[str, Any]


@dataclass
class _Fleet:
    """The engines and what is on its way to them: `coming` → decoding → a lane's `queue` → its `held` → answered."""

    job: Job
    draft: Draft | None
    waves: Waves
    max_model_len: int
    emit: Emit
    tick: Callable[[], None]
    notice: Callable[[Status], None]
    made: _Made
    slots: int  # of engines that start from now on
    lanes: list[Lane] = field(default_factory=list)
    coming: deque[Video] = field(default_factory=deque)  # of the wave that was taken last
    open: dict[str, tuple[Planned, Video]] = field(default_factory=dict)  # all requests between plan and answer
    decoding: dict[Any, tuple[Video, Lane, list[Planned], Any]] = field(default_factory=dict)
    feeding: dict[Any, tuple[Lane, Any, list[Planned]]] = field(default_factory=dict)
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
        self.bound = self.job.max_bytes_in_flight or int(ray.cluster_resources()["object_store_memory"] / 4)
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
            ray.cancel(reference, force=True)
        for lane in self.lanes:
            if lane.engine is not None:
                ray.kill(lane.engine)

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
        task: Any = decode_video
        if lane.node is not None:
            task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(lane.node, soft=True))
        first = video.requests[0]
        known, pixels = task.remote(self.made.decode, first.info, first.plan, self.job.decode_timeout)
        video.pixels, video.tries = None, video.tries + 1
        lane.decoding += len(requests)
        self.decoding[known] = (video, lane, requests, pixels)

    def _take_frames(self, reference: Any) -> None:
        video, lane, requests, pixels = self.decoding.pop(reference)
        lane.decoding -= len(requests)
        known = _decoded(reference)
        self._happened()
        if isinstance(known, RequestError) and known.code == "decode_crashed" and video.tries < DECODES:
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
        settings = self.made.settings | {"max_num_seqs": lane.slots}
        actor = EngineActor.options(**self.made.options)  # type: ignore[attr-defined]
        lane.engine = actor.remote(self.made.load, self.job.model, settings)
        lane.ready = lane.engine.ready.remote()

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
            if (request := source.popleft()).request_id in self.open:  # else its video was lost and is no more
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
            under_way = {id(video) for video, *_ in self.decoding.values()}
            for video in missing.values():
                if id(video) not in under_way:
                    self._decode(video, lane, [])
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
            self.feeding[lane.engine.feed.remote(wanted, video.pixels)] = (lane, lane.engine, alike)

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
        if ray.wait(references, timeout=0.05 if idle else 1.0, fetch_local=False)[0]:
            for reference in ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]:
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
            lane.node, lane.ready = ray.get(lane.ready), None
        except RayActorError as error:
            if "creation task" in str(error):
                raise RunError(f"the engine is gone: it could not start: {_last_line(error)}; {RESUMES}") from error
            self._died(lane, "worker_killed", "its process died while it started")
            return
        lane.results = lane.engine.run.remote(self.draft, self.job.mode)
        lane.moved()
        self._happened()

    def _take_fed(self, reference: Any) -> None:
        """Frames that were lost on their way, with a machine, are decoded again."""
        lane, engine, requests = self.feeding.pop(reference)
        try:
            ray.get(reference)
        except RayActorError:
            return  # the engine's stream tells
        except RayError:
            requests = [r for r in requests if lane.engine is engine and lane.held.pop(r.request_id, None)]
            for video, alike in _by_video([self.open[r.request_id] for r in requests]):
                self._decode(video, lane, alike)
            if lane.trial is not None and not lane.held:
                lane.trial = None

    def _take_beat(self, lane: Lane) -> None:
        reference, lane.beat = lane.beat, None
        try:
            pulse = ray.get(reference)
        except RayError:
            return  # the engine's stream tells
        if pulse != lane.pulse:
            lane.pulse = pulse
            lane.moved()
            self._happened()

    def _take_result(self, lane: Lane) -> None:
        try:
            result = ray.get(next(lane.results))
        except StopIteration:
            self._died(lane, "worker_killed", "it ended by itself")
        except RayActorError:
            self._died(lane, "worker_killed", "its process died, killed or out of memory")
        except RayTaskError as error:
            code = error.cause.code if isinstance(error.cause, RequestError) else "worker_killed"
            self._died(lane, code, _last_line(error))
        except RayError as error:  # an answer that was lost with its machine
            self._died(lane, "worker_killed", str(error).splitlines()[0])
        else:
            lane.moved()
            if lane.held.pop(result.request_id, None) is not None:
                lane.answered += 1
                self.barren = 0
                self._answer(result)
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
        ray.kill(lane.engine)
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
                lane.asked, lane.beat = now, lane.engine.pulse.remote()
        if now - self.moved > self.job.stall_timeout:
            raise RunError(f"nothing has moved for {self.job.stall_timeout:g} s: {self._stalled()}; {RESUMES}")

    def _happened(self) -> None:
        self.moved = time.monotonic()

    def _stalled(self) -> str:
        """Which stage waits, and for what."""
        free = {name: round(amount, 2) for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        asks = ", ".join(f"{name} {value:g}" for name, value in self.made.options.items())
        starting = [str(lane.number) for lane in self.lanes if not lane.up]
        stages = [
            (self.decoding, f"{len(self.decoding)} videos wait for a CPU to decode on"),
            (starting, f"engine {', '.join(starting)} waits for its start ({asks})"),
            (not self.waves.closed and not self.coming, "the next headers are being read"),
        ]
        return "; ".join(text for waits, text in stages if waits) + f"; free in the cluster: {free}"


def _by_video(requests: list[tuple[Planned, Video]]) -> Iterator[tuple[Video, list[Planned]]]:
    """Neighbours that share frames."""
    alike: list[Planned] = []
    for number, (request, video) in enumerate(requests):
        alike.append(request)
        if number + 1 == len(requests) or requests[number + 1][1] is not video:
            yield video, alike
            alike = []


class _Printed:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, status: Status) -> None:
        if time.monotonic() - self.told >= PROGRESS:
            self.told = time.monotonic()
            print(status.line(), file=sys.stderr, flush=True)


def _decoded(reference: Any) -> Frames | RequestError:
    """A decode task's facts; a task that died or failed in an unforeseen way is a failure of its video."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        return RequestError("decode_error", f"decoding failed: {_last_line(error)}")
    except RayError as error:
        return RequestError("decode_crashed", f"the decoding process died: {str(error).splitlines()[0]}")


def _last_line(error: Exception) -> str:
    """Of a remote traceback: what was raised."""
    return str(error).strip().splitlines()[-1]


# -------------------------------------------------------------------------------------------------------- the cluster


@contextmanager
def cluster(job: Job) -> Iterator[None]:
    """Ray: what runs in this process already, the cluster that the environment names, or one on this machine for the
    time of the block."""
    if ray.is_initialized():
        yield
        return
    try:
        _start(job)
    except Exception as error:  # Ray raises bare ones
        raise RunError(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _start(job: Job) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        # `ray job submit --working-dir` has brought the checkout along already
        submitted = "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
        ray.init(runtime_env=None if submitted else {"working_dir": str(ROOT)}, **quiet)
        return
    # a key of this cluster's own; Ray would leave one in the home folder, and the user's own clusters then ask for it
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    # inherited by the processes that Ray starts, which find this checkout through it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = max(256 << 20, min(2 << 30, memory // 8), 2 * (job.max_bytes_in_flight or 0))
    ray.init(address="local", num_cpus=max(2, cores), include_dashboard=False, object_store_memory=store, **quiet)


def engine_share(job: Job) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """How many engines, Ray's options and the settings of each: its GPUs if there are any, else its part of a machine's
    cores but those that decode, since threads of an engine that share cores with a decoder slow each other down
    tenfold."""
    resources, gpus = ray.cluster_resources(), job.pipeline_parallel_size
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = resources.get("CPU", 0)
    if cpus < 2:
        raise RunError("the cluster has fewer than 2 CPUs; an engine and a decoder need one each")
    if resources.get("GPU", 0) >= 1:
        most = max(machine.get("GPU", 0) for machine in machines)
        if most < gpus:
            raise RunError(f"--pipeline-parallel-size is {gpus}: no machine of the cluster has more than {most:g} GPUs")
        count = job.concurrency or int(sum(machine.get("GPU", 0) // gpus for machine in machines))
        if cpus < count + 1:
            raise RunError(f"{count} engines and a decoder need {count + 1} CPUs; the cluster has {cpus:g}")
        return count, {"num_gpus": gpus, "num_cpus": 1}, {"device": "cuda"}
    count = job.concurrency or 1
    cores = int(max(machine.get("CPU", 0) for machine in machines))
    each = (cores - max(1, cores // 4)) / -(-count // len(machines))
    threads = max(1, int(each))
    return count, {"num_cpus": threads if each >= 1 else round(each, 4)}, {"device": "cpu", "threads": threads}


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that gets the number of a SIGINT or SIGTERM; Ray's own handlers are put back afterwards."""
    received: list[int] = []
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
