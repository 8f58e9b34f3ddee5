"""Runs a job's waves: the cluster, the engines' share of it, signals. What happens in between is in `fleet.py`."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from pipeline import frames
from pipeline.actors import Decode, Load, RayHands
from pipeline.config import ROOT, Job
from pipeline.fleet import Emit, Fleet
from pipeline.flow import Lane, Status
from pipeline.hands import Waves
from pipeline.types import RunError
from std_core.engine import Engine
from std_core.types import Draft

PROGRESS = 5.0  # s between two lines on standard error
STARTS = 3  # tries to start Ray on this machine


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
        hands = RayHands(load, decode, job, draft, options, settings)
        bound = job.max_bytes_in_flight or int(ray.cluster_resources()["object_store_memory"] / 4)
        slots = job.max_num_seqs
        fleet = Fleet(job, waves, max_model_len, emit, tick, notice or _Printed(), hands, slots, bound)
        fleet.lanes += [Lane(number, slots) for number in range(count)]
        try:
            fleet.run(stopped)
        finally:
            fleet.close()
        return fleet.decoded


class _Printed:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, status: Status) -> None:
        if time.monotonic() - self.told >= PROGRESS:
            self.told = time.monotonic()
            print(status.line(), file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- the cluster


@contextmanager
def cluster(job: Job) -> Iterator[None]:
    """Ray: what runs in this process already, the cluster that the environment names, or one on this machine for the
    time of the block."""
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
