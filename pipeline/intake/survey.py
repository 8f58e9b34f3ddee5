"""The survey of a job: facts about its model and input, then its planned requests.

A survey reads the model's configuration without weights, the manifest and the videos' headers. That
needs PyTorch and transformers. The driver uses `SubprocessSurvey`, whose process
(`pipeline.intake.survey_process`) runs beside it, so that the driver imports neither and reading
headers does not delay it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from pipeline.config import ROOT, Job
from pipeline.intake.prefetch import Source
from pipeline.records import RESUME_HINT, ProbedRequest, RunError
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import Device

logger = logging.getLogger(__name__)

# Not `-m`: it would search the working directory first, where a user's folder may have the name of
# this package. The working directory has to stay, since inputs may be relative paths.
_SERVE = (
    "import sys; sys.path[0] = sys.argv[1]; "
    "from pipeline.intake.survey_process import serve; serve(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class JobFacts:
    """Facts about a job's model and input.

    Args:
        revision: of the model's checkpoint.
        max_model_len: tokens of a request, prompt and answer.
        model_size: of the whole model, in the job's precision.
        samples_by_default: whether the model's generation configuration samples.
        device: of the machine that runs the survey.
        input_schema: see `Manifest`.
    """

    revision: str
    max_model_len: int
    model_size: ModelSize
    samples_by_default: bool
    device: Device
    input_schema: pa.Schema


@dataclass(frozen=True)
class InputTotals:
    """Counts of an input that was read to its end.

    Args:
        requests: all requests, including those that had an output row before the run.
        failed: requests whose row from before the run is an error row that is kept.
    """

    requests: int
    failed: int


@dataclass(frozen=True)
class SurveyTask:
    """The first message to the survey process.

    Args:
        isolate_probes: read each video's headers in a process of its own, see
            `pipeline.video.isolated_probe`.
    """

    job: Job
    prompts: tuple[str, ...]
    isolate_probes: bool = False


@dataclass(frozen=True)
class RowIds:
    """The second message: binary request ids, joined.

    Args:
        done: of requests that need no new row.
        failed: of those among them whose row is an error.
    """

    done: bytes
    failed: bytes


class Survey(Protocol):
    """A context manager that ends the survey: `SubprocessSurvey`, or
    `pipeline.intake.survey_process.InProcessSurvey`."""

    @property
    def facts(self) -> JobFacts:
        """Raises UsageError for an invalid model, draft or input, unless making the survey has."""

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        """Starts planning the requests of the input, once.

        Args:
            done: binary ids of the requests that have a row.
            failed: of those whose row is an error.
        """

    @property
    def totals(self) -> InputTotals:
        """Known once all batches are taken."""

    def __enter__(self) -> Survey: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


class SubprocessSurvey:
    """A `Survey` in a process that does not outlive this one, and the `Source` of its batches.

    The messages over the pipe: `SurveyTask` to the process, `JobFacts` back, `RowIds` to the
    process, then batches of requests and `InputTotals` back. An exception may come in place of any
    answer.

    If reading a video's headers crashes the process, a second one reads the rest of the input and
    isolates the probes.

    Raises:
        UsageError: see `Survey`.
        RunError: the process ended, and no video's headers can be the reason.
    """

    def __init__(self, job: Job, prompts: Sequence[str]):
        self._task = SurveyTask(job, tuple(prompts))
        self._row_ids: RowIds | None = None  # once started
        self._delivered_ids = bytearray()  # joined binary ids of the requests taken so far
        self._facts: JobFacts | None = None
        self._totals: InputTotals | None = None
        self._start_process()

    @property
    def facts(self) -> JobFacts:
        """Waits until they are known, for seconds: the process imports PyTorch."""
        if self._facts is None:
            self._facts = self._receive()
        return self._facts

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        _ = self.facts  # the process sends them first
        self._row_ids = RowIds(b"".join(done), b"".join(failed))
        self._send(self._row_ids)
        return self

    @property
    def closed(self) -> bool:
        return self._totals is not None

    @property
    def totals(self) -> InputTotals:
        assert self._totals is not None, "not all batches are taken"
        return self._totals

    def take(self, timeout: float = 0.0) -> list[ProbedRequest] | None:
        """As `Source.take`. Raises what the survey raised, and RunError if its process ended."""
        if self.closed or not self._pipe.poll(timeout):
            return None
        answer = self._receive()
        if isinstance(answer, InputTotals):
            self._totals = answer
            return None
        for request in answer:
            self._delivered_ids += bytes.fromhex(request.request_id)
        return answer

    def _start_process(self) -> None:
        self._pipe, child_pipe = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(ROOT), str(child_pipe.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the driver's standard output ends with its JSON summary
            pass_fds=(child_pipe.fileno(),),
            start_new_session=True,  # Ctrl-C is for the driver, which then ends this process
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        child_pipe.close()
        self._send(self._task)

    def _stop_process(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _send(self, message: SurveyTask | RowIds) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_receive` then reports how the process ended
            self._pipe.send(message)

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._restart_isolated(self._process.wait())
            return []  # a batch of no requests
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _restart_isolated(self, exit_code: int) -> None:
        """Starts a second process that isolates the probes and leaves out what was delivered.

        Raises:
            RunError: the process was not ended by a signal, had not read a video yet, or isolated
                the probes already.
        """
        if exit_code < 0:
            cause = f"by {signal.Signals(-exit_code).name}"
        else:
            cause = f"with exit status {exit_code}"
        row_ids = self._row_ids
        if exit_code >= 0 or self._task.isolate_probes or row_ids is None:
            raise RunError(f"the process that reads the input was ended {cause}; {RESUME_HINT}")
        logger.warning(
            "the process that reads the input was ended %s: "
            "each video's headers are now read in a process of their own",
            cause,
        )
        self._stop_process()
        self._task = replace(self._task, isolate_probes=True)
        self._start_process()
        self._facts = self._receive()
        self._send(replace(row_ids, done=row_ids.done + self._delivered_ids))

    def __enter__(self) -> SubprocessSurvey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop_process()
