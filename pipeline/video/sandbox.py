"""Processes in which decoders run, so that one that spins, aborts or takes all memory can be ended
from outside.

A worker is a small process that has loaded the decoders; every attempt is a fork of it, with its
own memory and CPU limits, and ends with the attempt. Pixels come back through an anonymous file in
memory, never through pickle. The worker and its attempts form a process group of their own, which
is killed at the deadline. It holds no video's state, so it serves any number of files without
growing."""

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

from pipeline.video.decode_job import DecodeError, DecodeJob, FrameBuffer

START_SECONDS = 120.0  # to load the decoders; a busy machine takes seconds
_ROOT = str(Path(__file__).resolve().parent.parent.parent)


@dataclass(frozen=True)
class DecodeOutcome:
    """What became of one attempt: frames, or `error` as (code, reason)."""

    pixels: np.ndarray | None = None  # (T, height, width, 3) uint8
    pts: tuple[float, ...] = ()
    frame_indices: tuple[
        int, ...
    ] = ()  # per planned time the number of its frame, or -1 where it is lost
    error: tuple[str, str] | None = None


# -------------------------------------------------------------------------------- the parent's side


class Worker:
    """A running worker. Not shared by threads: whoever takes it from the pool has it alone.

    Raises DecodeError `decode_crashed` where its process ends, or is not ready in time.
    """

    def __init__(self) -> None:
        self.environment = _settings()
        self.memory = os.memfd_create("frames")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.video.sandbox", str(self.memory)],
            cwd=_ROOT,  # where `-m` looks first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.memory,),
            start_new_session=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        if self._line(START_SECONDS) != b"ready\n":
            self.close()
            raise DecodeError(
                "decode_crashed", "its process did not start; what it said is on standard error"
            )

    def run(
        self, decoder: str, job: DecodeJob, memory_bytes: int, cpu_seconds: int, deadline: float
    ) -> DecodeOutcome:
        """One attempt by the function `decoder` ("module:name"), ended after `deadline` s at the
        latest."""
        limits = {"memory": memory_bytes, "cpu": cpu_seconds, "deadline": deadline}
        assert self.process.stdin is not None
        os.ftruncate(self.memory, 0)
        try:
            self.process.stdin.write(
                json.dumps({"decoder": decoder, "job": asdict(job), **limits}).encode() + b"\n"
            )
            self.process.stdin.flush()
            status = self._line(deadline)
        except BrokenPipeError:
            status = b""
        if status:
            return self._outcome(int(status), job)
        self.close()
        if status is None:
            return DecodeOutcome(error=("decode_timeout", f"it took longer than {deadline:.3g} s"))
        return DecodeOutcome(error=("decode_crashed", "its process was killed"))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """Kills the worker and what it started."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(
                BrokenPipeError
            ):  # what it was to be told, and did not live to read
                pipe.close()
        os.close(self.memory)

    def _line(self, seconds: float) -> bytes | None:
        """The worker's next line; empty if it ended, None if none came in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def _outcome(self, status: int, job: DecodeJob) -> DecodeOutcome:
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU or code == -signal.SIGALRM:
            return DecodeOutcome(error=("decode_timeout", "it used up its CPU time"))
        if code:
            cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return DecodeOutcome(error=("decode_crashed", f"it crashed ({cause})"))
        return _unpack(self.memory, job)


def _unpack(memory: int, job: DecodeJob) -> DecodeOutcome:
    """The frames, copied out; the buffer holds room for all planned ones, then the report."""
    room = len(job.times) * job.height * job.width * 3
    length = os.fstat(memory).st_size - room
    if length <= 0:
        return DecodeOutcome(error=("decode_crashed", "its process ended without a word"))
    report = json.loads(os.pread(memory, length, room))
    if report["error"]:
        return DecodeOutcome(error=tuple(report["error"]))
    pixels = np.empty((len(report["pts"]), job.height, job.width, 3), np.uint8)
    at = 0
    view = pixels.reshape(-1).data
    while at < len(view):  # one read returns 2 GiB at the most
        at += os.preadv(memory, [view[at:]], at)
    shows = report["shows"] + [-1] * (len(job.times) - len(report["shows"]))
    return DecodeOutcome(pixels, tuple(report["pts"]), tuple(shows))


_idle: list[Worker] = []
os.register_at_fork(
    after_in_child=_idle.clear
)  # a worker answers the process that started it, no other


def _settings() -> dict[str, str]:
    """What of the environment decides how storage is reached and code is found."""
    return {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("AWS_", "FSSPEC_", "PYTHON"))
    }


def take_worker() -> Worker:
    """An idle worker that was started under the present settings, else a new one."""
    while _idle:
        worker = _idle.pop()
        if worker.alive and worker.environment == _settings():
            return worker
        worker.close()
    return Worker()


def return_worker(worker: Worker) -> None:
    """Back to the pool, if it still runs."""
    if worker.alive:
        _idle.append(worker)


@atexit.register
def close_workers() -> None:
    """Ends all idle workers."""
    while _idle:
        _idle.pop().close()


# -------------------------------------------------------------------------------- the worker's side


def serve(memory: int) -> None:
    """Answers each line of standard input with the exit status of the fork that did what it
    says."""
    sys.modules["nvidia"] = None  # type: ignore[assignment]  # decord would load all of CUDA: 2 s and 650 MB for nothing
    with contextlib.suppress(ImportError, OSError):  # without it, each attempt by decord says so
        importlib.import_module("decord")
    importlib.import_module("pipeline.video.decord_reader")
    importlib.import_module("pipeline.video.pyav_reader")
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        task = json.loads(line)
        if task["job"]["remote"]:
            importlib.import_module("pipeline.storage")  # once, not in every fork
        child = os.fork()
        if child == 0:
            _attempt(memory, task)
        _, status = os.waitpid(child, 0)
        sys.stdout.buffer.write(f"{status}\n".encode())
        sys.stdout.buffer.flush()


def _attempt(memory: int, task: dict[str, Any]) -> None:
    """The fork's whole life. Decoders write to standard output and error as they like: nobody
    listens."""
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (task["memory"], task["memory"]))
    resource.setrlimit(resource.RLIMIT_CPU, (task["cpu"], task["cpu"] + 1))
    signal.setitimer(
        signal.ITIMER_REAL, task["deadline"] + 5
    )  # should nobody be left to hold the deadline
    job = DecodeJob(**task["job"] | {"times": tuple(task["job"]["times"])})
    module, name = task["decoder"].split(":")
    _report(memory, job, module, name)
    os._exit(0)


def _report(memory: int, job: DecodeJob, module: str, name: str) -> None:
    """Runs the decoder; leaves the frames and, behind room for all planned ones, the report in the
    shared memory."""
    error = None
    buffer = FrameBuffer(memory, job)
    try:
        getattr(importlib.import_module(module), name)(job, buffer)
    except MemoryError:
        error = ("decode_crashed", "it ran out of the memory it may take")
    except Exception as failure:  # whatever a decoder raises is this attempt's result
        error = (getattr(failure, "code", "decode_error"), _reason(failure))
    report = {"pts": buffer.pts, "shows": buffer.frame_indices, "error": error}
    os.pwrite(memory, json.dumps(report).encode(), os.fstat(memory).st_size)


def _reason(failure: Exception) -> str:
    """One line, without the file's name: the parent names it, redacted."""
    if isinstance(failure, DecodeError):
        return failure.reason
    if hasattr(failure, "code"):  # storage's own, whose message is written for people
        return str(failure)
    return getattr(failure, "strerror", None) or type(failure).__name__


if __name__ == "__main__":
    serve(int(sys.argv[1]))
