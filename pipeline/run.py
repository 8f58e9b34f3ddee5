"""The driver of one engine: videos are decoded a little ahead of it, requests fed as their frames arrive, results
handed on as rows finish. Everything here is in one thread, so that every request is handed on exactly once."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.util.metrics
from ray.exceptions import RayActorError, RayError, RayTaskError

from pipeline.actors import Group, decode_video
from pipeline.config import ROOT, Job
from pipeline.progress import Flow, Watch
from pipeline.types import FramePlan, Frames, Planned, RequestError, RunError, Wave
from pipeline.windows import part, spans
from std_core.types import Draft, Request, Result

AHEAD = 2  # × max_num_seqs requests decoded or decoding before an engine's slots
RESUMES = "what is finished is written, and the same command resumes"

Emit = Callable[[Planned, Frames | None, Result], None]


def drive(job: Job, draft: Draft | None, waves: Iterable[Wave], max_model_len: int, emit: Emit, watch: Watch) -> int:
    """Runs the waves in their order through one engine.

    Args:
        max_model_len: context and text of a request together, in tokens.
        emit: gets every request once, with its frames' facts (None where they failed) and its result.
        watch: is told where the rest is.

    Returns:
        How many videos were decoded.

    Raises:
        RunError: the engine died, the cluster is too small, or SIGINT or SIGTERM arrived.
    """
    with cluster(job), _signals() as stopped:
        options, settings = _share(job)
        for name in ("dtype", "max_num_seqs", "strict", "pipeline_parallel_size", "tensor_parallel_size"):
            settings[name] = getattr(job, name)
        watch.attach(ray.util.metrics, engines=1, device=settings["device"], max_bytes_in_flight=_bound(job))
        engine = Group.start(job.model, settings, options)
        line = _Line(job, max_model_len, emit, engine, *engine.run(draft, job.mode), _videos(waves))
        try:
            while not line.finished:
                line.admit()
                line.step()
                watch.look(line.flow)
                if stopped:
                    raise RunError(f"stopped by {signal.Signals(stopped[0]).name}; {RESUMES}")
        finally:
            engine.kill()
        return line.decoded


@dataclass
class _Video:
    """Requests whose frames are decoded in one pass, from the plan until the last of them is answered."""

    requests: list[Planned]
    plan: FramePlan  # of the pass
    left: int
    nbytes: int  # of its frames as planned
    pixels: Any = None  # reference to them, until they are fed
    frames: dict[str, Frames] = field(default_factory=dict)  # footage → what is known of its frames, without pixels


def _videos(waves: Iterable[Wave]) -> Iterator[_Video]:
    for wave in waves:
        for span in spans(wave.requests):
            yield _Video(list(span.requests), span.plan, len(span.requests), span.nbytes)


@dataclass
class _Line:
    """What is under way: `waiting` → `decoding` → `feeding` → `seated`."""

    job: Job
    max_model_len: int
    emit: Emit
    engine: Group
    results: Any  # the engine's stream
    following: list[Any]  # references of its other ranks
    planned: Iterator[_Video]
    waiting: _Video | None = None  # the next of them
    decoding: dict[Any, _Video] = field(default_factory=dict)
    feeding: set[Any] = field(default_factory=set)
    seated: dict[str, tuple[Planned, _Video]] = field(default_factory=dict)
    nbytes: int = 0  # of frames that are decoding or held
    decoded: int = 0
    fed: int = 0  # videos that the engine has taken
    ended: bool = False
    finished: bool = False

    def admit(self) -> None:
        """Starts decoding what fits in memory and is near enough to its turn; tells the engine when nothing is left."""
        while (video := self._next()) and self._fits(video):
            self.waiting, first = None, video.requests[0]
            task: Any = decode_video.remote(first.info, video.plan, self.job.decode_timeout)
            known, video.pixels = task
            self.decoding[known] = video
            self.nbytes += video.nbytes
        if not (video or self.decoding or self.feeding or self.ended):
            self.engine.end()
            self.ended = True

    def _next(self) -> _Video | None:
        """Looks at the next video without taking it."""
        self.waiting = self.waiting or next(self.planned, None)
        return self.waiting

    def _fits(self, video: _Video) -> bool:
        ahead = len(self.seated) + sum(len(v.requests) for v in self.decoding.values())
        if not ahead:
            return True  # a video beyond the bounds goes alone
        return ahead < (AHEAD + 1) * self.job.max_num_seqs and self.nbytes + video.nbytes <= _bound(self.job)

    def step(self) -> None:
        """Waits, a second at most, for whatever comes first, and takes it."""
        ready, _ = ray.wait(
            [self.results, *self.following, *self.decoding, *self.feeding], timeout=1, fetch_local=False
        )
        for reference in ready:
            if reference in self.decoding:
                self._take_frames(reference)
            elif reference in self.feeding:
                self.feeding.remove(reference)
                _from_engine(reference)
                self.fed += 1
            elif reference in self.following:
                self.following.remove(reference)
                _from_engine(reference)
            else:
                self._take_result()

    def _take_frames(self, reference: Any) -> None:
        video = self.decoding.pop(reference)
        frames = _decoded(reference)
        self.decoded += 1
        for request in video.requests:
            self.seated[request.request_id] = (request, video)
        requests, numbers = [], []
        for request in video.requests:
            own, picks = (frames, ()) if isinstance(frames, RequestError) else part(frames, video.plan, request.plan)
            if isinstance(own, RequestError):
                self._answer(Result(request.request_id, [], "", "error", error=own))
                continue
            video.frames[request.footage] = own
            requests.append(self._request(request, own))
            numbers.append(picks)
        if requests:
            self.feeding.add(self.engine.feed(requests, video.pixels, numbers))
        video.pixels = None  # from here on the engine holds them

    def _request(self, planned: Planned, frames: Frames) -> Request:
        room = self.max_model_len - planned.context
        sampling = replace(self.job.sampling, max_tokens=min(self.job.max_tokens, room))
        prompt, footage = planned.item.prompt, planned.footage
        return Request(planned.request_id, prompt, None, footage, frames.fps, sampling, times=frames.pts)

    def _take_result(self) -> None:
        try:
            reference = next(self.results)
        except StopIteration:
            self.finished = True
            if self.seated:
                raise RunError(f"the engine left {len(self.seated)} requests unanswered; {RESUMES}") from None
            return
        self._answer(_from_engine(reference))

    def _answer(self, result: Result) -> None:
        request, video = self.seated.pop(result.request_id)
        video.left -= 1
        if not video.left:
            self.nbytes -= video.nbytes
        self.emit(request, video.frames.get(request.footage), result)

    @property
    def flow(self) -> Flow:
        """Where the requests are that have no row yet."""
        return Flow(len(self.decoding), len(self.seated), self.nbytes, ready=self.fed > 0 or not self.feeding)


def _bound(job: Job) -> float:
    """Bytes of frames held at once, at most."""
    return job.max_bytes_in_flight or ray.cluster_resources()["object_store_memory"] / 4


def _decoded(reference: Any) -> Frames | RequestError:
    """A decode task's facts; a task that died or failed in an unforeseen way is a failure of its video."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        return RequestError("decode_error", f"decoding failed: {_last_line(error)}")
    except RayError as error:
        return RequestError("decode_crashed", f"the decoding process died: {str(error).splitlines()[0]}")


def _from_engine(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayActorError as error:
        started = "creation task" not in str(error)
        why = "its process died, killed or out of memory" if started else f"it could not start: {_last_line(error)}"
        raise RunError(f"the engine is gone: {why}; {RESUMES}") from error
    except RayTaskError as error:
        raise RunError(f"the engine failed: {_last_line(error)}; {RESUMES}") from error


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


def _share(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ray's options and the engine's settings, of each of its ranks: its GPUs if there are any, else an equal part of
    all cores of a machine but those that decode, since threads of an engine that share cores with a decoder slow each
    other down tenfold."""
    resources = ray.cluster_resources()
    if resources.get("CPU", 0) < 2:
        raise RunError("the cluster has fewer than 2 CPUs; an engine and a decoder need one each")
    if resources.get("GPU", 0) >= 1:
        most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
        for name in ("pipeline_parallel_size", "tensor_parallel_size"):
            if most < (gpus := getattr(job, name)):
                flag = "--" + name.replace("_", "-")
                raise RunError(f"{flag} is {gpus}: no machine of the cluster has more than {most:g} GPUs")
        return {"num_gpus": job.pipeline_parallel_size, "num_cpus": 1}, {"device": "cuda"}
    cores = int(max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]))
    threads = max(1, cores - max(1, cores // 4))
    ranks = job.tensor_parallel_size
    return {"num_cpus": threads / ranks}, {"device": "cpu", "threads": max(1, threads // ranks)}


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
