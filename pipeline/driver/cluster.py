"""Run a job's waves on Ray: connect to the cluster, receive signals, run the driver.

The run itself is in `driver.py`, the engines' share of the cluster in `resources.py`.
"""

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
from pipeline.driver.decode_task import Decode
from pipeline.driver.driver import Driver
from pipeline.driver.engine_actor import EngineLoader, load_engine
from pipeline.driver.ray_backend import RayBackend, engine_device
from pipeline.driver.resources import ClusterResources, EngineResources
from pipeline.driver.state import DEFAULT_LIMITS, DriverLimits
from pipeline.records import CompletedRequest, RunError, RunSnapshot
from pipeline.video import frames

START_ATTEMPTS = 3  # to start Ray on this machine


class RunObserver(Protocol):
    """Follows a run, as `pipeline.report.monitor.RunMonitor` does."""

    def attach_metrics(self, instruments: Any, **facts: Any) -> None:
        """Get the metrics module and facts of the run, before the first engine is started."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Get the run's counts, after every step of the driver."""


def drive(
    job: Job,
    waves: WaveSource,
    *,
    max_model_len: int,
    on_completed: Callable[[CompletedRequest], None],
    observer: RunObserver,
    on_step: Callable[[], None] = lambda: None,
    load: EngineLoader = load_engine,
    decode: Decode = frames.decode,
    limits: DriverLimits = DEFAULT_LIMITS,
) -> int:
    """Run all requests of a source of waves.

    Args:
        max_model_len: limit of a request's context and text together, in tokens.
        on_completed: called once per request.
        observer: gets the metrics module and a snapshot per step.
        on_step: called after every step of the driver, at least once a second.
        load, decode: replace the engine and the decoder in tests and benchmarks of the driver.
        limits: how far the driver works ahead of the engines.

    Returns:
        How many videos were decoded.

    Raises:
        RunError: engines cannot start, nothing makes progress, the cluster is too small, or SIGINT
            or SIGTERM arrived.
        UsageError: the waves are planned for another device, or none of their requests fits the
            device of the cluster.
    """
    with cluster(job), _received_signals() as signals:
        resources = EngineResources(job, ClusterResources.current())
        waves.begin(engine_device(resources.device), resources.engines)
        observer.attach_metrics(
            ray.util.metrics,
            engines=resources.engines,
            device=resources.device,
            max_bytes_in_flight=resources.max_frame_bytes,
        )
        driver = Driver(
            job,
            waves=waves,
            backend=RayBackend(job, load, decode, resources),
            on_completed=on_completed,
            on_snapshot=observer.update,
            on_step=on_step,
            engines=resources.engines,
            max_frame_bytes=resources.max_frame_bytes,
            max_model_len=max_model_len,
            limits=limits,
        )
        try:
            driver.run(signals)
        finally:
            driver.close()
        return driver.state.decoded_videos


# ------------------------------------------------------------------------------------- the cluster


@contextmanager
def cluster(job: Job) -> Iterator[None]:
    """Connect to Ray for the time of the block.

    The cluster is the one that this process is already connected to, which stays connected; else
    the one that `RAY_ADDRESS` names; else a new one on this machine.
    """
    if ray.is_initialized():
        yield
        return
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _start(job)
            break
        except Exception as error:  # Ray raises bare exceptions
            ray.shutdown()
            reason = str(error).strip().splitlines()[0]
            # a time-out may only mean that the machine is busy
            if attempt == START_ATTEMPTS or "timed out" not in reason:
                raise RunError(f"Ray did not start: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _start(job: Job) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        # `ray job submit --working-dir` has already sent the checkout to the cluster
        submitted = "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
        ray.init(runtime_env=None if submitted else {"working_dir": str(ROOT)}, **quiet)
        return
    # a token for this cluster alone: else Ray writes one to the home folder, and the user's other
    # clusters demand it from then on
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    # Ray's worker processes inherit this and import the checkout from it
    python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{python_path}" if python_path else str(ROOT)
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


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """A list that the numbers of SIGINT and SIGTERM are appended to, instead of Ray's handlers."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
