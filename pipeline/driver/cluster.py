"""Runs a job's waves: the cluster, the engines' share of it, signals. What happens in between is in
`fleet.py`."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import ray
import ray.util.metrics

from pipeline.config import ROOT, Job
from pipeline.driver.backend import WaveSource
from pipeline.driver.decode_queue import Intake
from pipeline.driver.decode_task import Decode
from pipeline.driver.feeder import Handover
from pipeline.driver.fleet import Emit, Fleet
from pipeline.driver.ray_backend import EngineLoader, RayBackend, device_of, load_engine
from pipeline.driver.replica import Replica
from pipeline.records import RunError, RunSnapshot
from pipeline.video import frames

STARTS = 3  # tries to start Ray on this machine


class RunObserver(Protocol):
    """Who is told how a run goes, as `pipeline.report.monitor.RunMonitor` is."""

    def attach_metrics(self, instruments: Any, **where: Any) -> None:
        """Once there are engines: metrics, and figures of the run."""

    def update(self, snapshot: RunSnapshot) -> None:
        """At every turn of the driver."""


def drive(
    job: Job,
    waves: WaveSource,
    *,
    max_model_len: int,
    on_answer: Emit,
    observer: RunObserver,
    on_step: Callable[[], None] = lambda: None,
    load: EngineLoader = load_engine,
    decode: Decode = frames.decode,
) -> int:
    """Runs the waves in their order.

    Args: max_model_len: context and text of a request together, in tokens. emit: gets every request
        once. tick: called often, between two calls of `emit`. load, decode: what stands for the
        engine and the decoder where the driver itself is looked at.

    Returns:
        How many videos were decoded.

    Raises: RunError: engines cannot start, nothing moves, the cluster is too small, or SIGINT or
        SIGTERM arrived. UsageError: the waves are planned for another device, or none of their
        requests fits the one there is.
    """
    with cluster(job), _signals() as stopped:
        count, options, settings = engine_share(job)
        for name in ("dtype", "strict", "pipeline_parallel_size", "tensor_parallel_size"):
            settings[name] = getattr(job, name)
        waves.begin(device_of(settings["device"]), count)
        bound = job.max_bytes_in_flight or int(ray.cluster_resources()["object_store_memory"] / 4)
        observer.attach_metrics(
            ray.util.metrics, engines=count, device=settings["device"], max_bytes_in_flight=bound
        )
        backend = RayBackend(load, decoder=decode, job=job, options=options, settings=settings)
        replicas = [Replica(number, job.max_num_seqs) for number in range(count)]
        intake = Intake(backend, waves, replicas, bound)
        handover = Handover(
            job, max_model_len=max_model_len, backend=backend, replicas=replicas, intake=intake
        )
        fleet = Fleet(
            job,
            waves=waves,
            emit=on_answer,
            tick=on_step,
            notice=observer.update,
            backend=backend,
            replicas=replicas,
            intake=intake,
            handover=handover,
        )
        try:
            fleet.run(stopped)
        finally:
            fleet.close()
        return intake.decoded


# -------------------------------------------------------------------------------------- the cluster


@contextmanager
def cluster(job: Job) -> Iterator[None]:
    """Ray: what runs in this process already, the cluster that the environment names, or one on
    this machine for the time of the block."""
    if ray.is_initialized():
        yield
        return
    for tries in range(STARTS):
        try:
            _start(job)
            break
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            why = str(error).strip().splitlines()[0]
            if tries + 1 == STARTS or "timed out" not in why:  # a machine may just be busy
                raise RunError(f"Ray did not start: {why}") from error
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
    # a key of this cluster's own; Ray would leave one in the home folder, and the user's own
    # clusters then ask for it
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    # inherited by the processes that Ray starts, which find this checkout through it
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = max(256 << 20, min(2 << 30, memory // 8), 2 * (job.max_bytes_in_flight or 0))
    ray.init(
        address="local",
        num_cpus=max(2, cores),
        include_dashboard=False,
        object_store_memory=store,
        **quiet,
    )


def engine_share(job: Job) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """How many engines; of each of an engine's ranks Ray's options and the engine's settings: its
    GPUs if there are any, else an equal part of a machine's cores but those that decode, since
    threads of an engine that share cores with a decoder slow each other down tenfold."""
    resources = ray.cluster_resources()
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = resources.get("CPU", 0)
    if cpus < 2:
        raise RunError("the cluster has fewer than 2 CPUs; an engine and a decoder need one each")
    if resources.get("GPU", 0) >= 1:
        return _share_of_gpus(job, machines, cpus)
    count = job.concurrency or 1
    ranks = job.tensor_parallel_size
    cores = int(max(machine.get("CPU", 0) for machine in machines))
    each = (cores - max(1, cores // 4)) / -(-count // len(machines)) / ranks
    options = {"num_cpus": int(each) if each >= 1 else round(each, 4)}
    return count, options, {"device": "cpu", "threads": max(1, int(each))}


def _share_of_gpus(
    job: Job, machines: list[dict[str, float]], cpus: float
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    most = max(machine.get("GPU", 0) for machine in machines)
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        if most < (gpus := getattr(job, name)):
            flag = "--" + name.replace("_", "-")
            raise RunError(
                f"{flag} is {gpus}: no machine of the cluster has more than {most:g} GPUs"
            )
    ranks = job.tensor_parallel_size
    of_rank = job.pipeline_parallel_size
    count = job.concurrency or int(
        sum(machine.get("GPU", 0) // (ranks * of_rank) for machine in machines)
    )
    if cpus < count * ranks + 1:
        raise RunError(
            f"{count} engines and a decoder need {count * ranks + 1} CPUs; the cluster has {cpus:g}"
        )
    return count, {"num_gpus": of_rank, "num_cpus": 1}, {"device": "cuda"}


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that gets the number of a SIGINT or SIGTERM; Ray's own handlers are put back
    afterwards."""
    received: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _: received.append(number))
        for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
