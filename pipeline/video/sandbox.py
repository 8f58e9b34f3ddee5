"""Decoding processes: a decoder that hangs, crashes or takes all memory costs one attempt.

A worker is a small process that has loaded the decoders. For each attempt it forks a child with
memory and CPU limits, which ends with the attempt, so a worker serves any number of files without
growing. Worker and child form a process group, which the parent kills at the deadline.

The protocol: the parent writes one task per line (JSON) to the worker's standard input. The child
writes the frames, then a report (JSON), to an anonymous file in shared memory that all three have
open. The worker then writes the child's wait status, a decimal number, as a line to its standard
output.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.video.decode_job import LOST, DecodeError, DecodeJob, FrameBuffer

START_SECONDS = 120.0  # to load the decoders, which takes seconds on a busy machine
_ROOT = str(Path(__file__).resolve().parent.parent.parent)


@dataclass(frozen=True)
class AttemptLimits:
    """What one attempt may take."""

    memory_bytes: int  # private memory
    cpu_seconds: int
    wall_seconds: float


@dataclass(frozen=True)
class DecodeOutcome:
    """The result of one attempt: the frames, or `error`."""

    pixels: np.ndarray | None = None  # (T, height, width, 3) uint8, RGB
    pts: tuple[float, ...] = ()  # s from the first frame of the video, per frame in `pixels`
    frame_indices: tuple[int, ...] = ()  # per planned time the index of its frame, or LOST
    error: DecodeError | None = None

    @property
    def num_lost(self) -> int:
        """Planned times without a frame."""
        return self.frame_indices.count(LOST)


def _failed(code: str, reason: str) -> DecodeOutcome:
    return DecodeOutcome(error=DecodeError(code, reason))


# ------------------------------------------------------------------------------------- parent


class Worker:
    """A running worker process. Used by one thread at a time: see `take_worker`.

    Raises:
        DecodeError: `decode_crashed` where the process ends or is not ready in time.
    """

    def __init__(self) -> None:
        self.environment = _relevant_environment()
        self.memory = os.memfd_create("frames")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.video.sandbox", str(self.memory)],
            cwd=_ROOT,  # `-m` searches the working directory first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.memory,),
            start_new_session=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        if self._read_line(START_SECONDS) != b"ready\n":
            self.close()
            raise DecodeError(
                "decode_crashed", "its process did not start; standard error shows its messages"
            )

    def run(self, decoder: str, job: DecodeJob, limits: AttemptLimits) -> DecodeOutcome:
        """Makes one attempt. After a timeout or a crash of the worker, the worker is closed.

        Args:
            decoder: the function to call, as "module:function".
        """
        assert self.process.stdin is not None
        os.ftruncate(self.memory, 0)
        task = {"decoder": decoder, "job": asdict(job), "limits": asdict(limits)}
        try:
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
            status = self._read_line(limits.wall_seconds)
        except BrokenPipeError:
            status = b""
        if status:
            return self._read_outcome(int(status), job)
        self.close()
        if status is None:
            return _failed("decode_timeout", f"it took longer than {limits.wall_seconds:.3g} s")
        return _failed("decode_crashed", "its process was killed")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """Kills the worker and its child."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a task that it did not read
                pipe.close()
        os.close(self.memory)

    def _read_line(self, seconds: float) -> bytes | None:
        """The worker's next line; empty if the process ended, None if no line came in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def _read_outcome(self, status: int, job: DecodeJob) -> DecodeOutcome:
        """The outcome of a child that ended with this wait status."""
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code in (-signal.SIGXCPU, -signal.SIGALRM):
            return _failed("decode_timeout", "it used up its CPU time")
        if exit_code:
            is_signal = exit_code < 0
            cause = signal.Signals(-exit_code).name if is_signal else f"exit status {exit_code}"
            return _failed("decode_crashed", f"it crashed ({cause})")
        return _read_frames(self.memory, job)


def _read_frames(memory: int, job: DecodeJob) -> DecodeOutcome:
    """Copies frames and report out of the shared memory, see `_decode_and_report`."""
    report_start = len(job.times) * job.height * job.width * 3
    report_bytes = os.fstat(memory).st_size - report_start
    if report_bytes <= 0:
        return _failed("decode_crashed", "its process ended without a report")
    report = json.loads(os.pread(memory, report_bytes, report_start))
    if report["error"]:
        return _failed(*report["error"])
    pixels = np.empty((len(report["pts"]), job.height, job.width, 3), np.uint8)
    view = pixels.reshape(-1).data
    offset = 0
    while offset < len(view):  # one read returns at most 2 GiB
        offset += os.preadv(memory, [view[offset:]], offset)
    indices = report["frame_indices"]
    unhandled = len(job.times) - len(indices)
    return DecodeOutcome(pixels, tuple(report["pts"]), (*indices, *[LOST] * unhandled))


_idle_workers: list[Worker] = []
os.register_at_fork(after_in_child=_idle_workers.clear)  # a fork must not share its parent's pipes


def _relevant_environment() -> dict[str, str]:
    """The variables that decide how storage is reached and where code is found."""
    prefixes = ("AWS_", "FSSPEC_", "PYTHON")
    return {key: value for key, value in os.environ.items() if key.startswith(prefixes)}


def take_worker() -> Worker:
    """An idle worker that was started with today's environment, else a new one."""
    while _idle_workers:
        worker = _idle_workers.pop()
        if worker.alive and worker.environment == _relevant_environment():
            return worker
        worker.close()
    return Worker()


def return_worker(worker: Worker) -> None:
    """Puts a worker back into the pool, if its process still runs."""
    if worker.alive:
        _idle_workers.append(worker)


@atexit.register
def close_workers() -> None:
    """Closes all idle workers."""
    while _idle_workers:
        _idle_workers.pop().close()


# ------------------------------------------------------------------------------------- worker


def serve(memory: int) -> None:
    """The worker's main loop: forks a child for each task on standard input."""
    # decord would load all of CUDA, which takes 2 s and 650 MB, although it is not used
    sys.modules["nvidia"] = None  # type: ignore[assignment]
    with contextlib.suppress(ImportError, OSError):  # if it does not load, its attempts fail
        importlib.import_module("decord")
    for module in ("decord_reader", "pyav_reader", "download"):
        importlib.import_module(f"pipeline.video.{module}")
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        task = json.loads(line)
        if task["job"]["remote"]:
            importlib.import_module("pipeline.storage")  # once, instead of in every child
        child = os.fork()
        if child == 0:
            _run_attempt(memory, task)
        _, status = os.waitpid(child, 0)
        sys.stdout.buffer.write(f"{status}\n".encode())
        sys.stdout.buffer.flush()


def _run_attempt(memory: int, task: dict[str, Any]) -> None:
    """Runs one attempt in the child, under its limits, and exits."""
    # the worker's standard output carries the protocol, which decoders must not write to
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    limits = AttemptLimits(**task["limits"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    # the parent enforces the deadline; the timer is for a parent that has died
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + 5)
    job = DecodeJob(**task["job"] | {"times": tuple(task["job"]["times"])})
    _decode_and_report(memory, job, task["decoder"])
    os._exit(0)


def _decode_and_report(memory: int, job: DecodeJob, decoder: str) -> None:
    """Calls the decoder, then writes the report behind the room for all planned frames."""
    error = None
    buffer = FrameBuffer(memory, job)
    try:
        module, function = decoder.split(":")
        getattr(importlib.import_module(module), function)(job, buffer)
    except MemoryError:
        error = ("decode_crashed", "it exceeded its memory limit")
    except Exception as failure:  # any exception of a decoder is the attempt's result
        error = (getattr(failure, "code", "decode_error"), _reason(failure))
    report = {"pts": buffer.pts, "frame_indices": buffer.frame_indices, "error": error}
    os.pwrite(memory, json.dumps(report).encode(), os.fstat(memory).st_size)


def _reason(failure: Exception) -> str:
    """The exception as a clause of one line. Without the file's name, which the parent adds in
    redacted form."""
    if isinstance(failure, DecodeError):
        return failure.reason
    if hasattr(failure, "code"):  # a RequestError of storage, whose message names the file redacted
        return str(failure)
    return getattr(failure, "strerror", None) or type(failure).__name__


if __name__ == "__main__":
    serve(int(sys.argv[1]))
