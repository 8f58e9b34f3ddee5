"""What is known of a job before anything runs, and who finds it out: of its model without weights,
of its input, of the requests that have no row yet. The work is `pipeline.intake.survey_process`'s;
drivers let it be done in a process of its own, so that they need neither PyTorch nor transformers,
and headers are read beside their work, not in between."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from pipeline.config import ROOT, Job
from pipeline.intake.prefetch import Source
from pipeline.records import (
    RESUME_HINT,
    RunError,
)
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import Device

if TYPE_CHECKING:
    from pipeline.records import (
        ProbedRequest,
    )

logger = logging.getLogger(__name__)

# no folder of the user's may pass for this package: relative inputs keep the working directory what
# it is
START = "import sys; sys.path[0] = sys.argv[1]; from pipeline.intake.survey_process import serve; serve(int(sys.argv[2]))"


@dataclass(frozen=True)
class JobFacts:
    """Of a job's model and input.

    Args:
        revision: of the checkpoint.
        max_model_len: tokens that a request may have in all.
        model_size: of the whole model, in the job's precision.
        do_sample: whether texts are drawn where the job does not say.
        device: where the input is read.
        input_schema: as `Manifest` has it.
    """

    revision: str
    max_model_len: int
    model_size: ModelSize
    do_sample: bool
    device: Device
    input_schema: pa.Schema


@dataclass(frozen=True)
class InputTotals:
    """Of an input, once it is read: its requests, those with a row included, and how many of them
    had a row that is an error and stays."""

    requests: int
    failed: int


class Survey(Protocol):
    """Who finds it out: `SubprocessSurvey`, or `pipeline.intake.survey_process.InProcessSurvey`. A context manager."""

    @property
    def facts(self) -> JobFacts:
        """Raises UsageError for what is wrong with the model, the draft or the input, if making one
        has not."""

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        """Reads the input, once.

        Args: done: fingerprints of the requests that have a row; `failed`: of those whose row is an
            error.
        """

    @property
    def totals(self) -> InputTotals:
        """Once all of it is taken."""

    def __enter__(self) -> Survey: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stops reading."""


class SubprocessSurvey:
    """A `Survey` in a process of its own, which does not outlive this one, and the `Source` that
    it begins. Where a video's headers end that process, another one reads the rest, and each
    video's in a process of its own first.

    Raises: UsageError: as `Survey` says. RunError: its process ended, with nothing read that was
        the cause.
    """

    def __init__(self, job: Job, prompts: Sequence[str]):
        self._asked = job, tuple(prompts)
        # joined fingerprints
        self._rows = (b"", b"")
        self._handed_on = bytearray()
        self._begun = self._wary = False
        self._facts: JobFacts | None = None
        self._closing: InputTotals | None = None
        self._start_process()

    @property
    def facts(self) -> JobFacts:
        """Waits for them, for seconds: the process loads what it needs."""
        if self._facts is None:
            self._facts = self._answer()
        return self._facts

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        _ = self.facts  # which come first
        self._rows = (b"".join(done), b"".join(failed))
        self._begun = True
        self._tell(self._rows)
        return self

    @property
    def closed(self) -> bool:
        return self._closing is not None

    @property
    def totals(self) -> InputTotals:
        assert self._closing is not None, "there is more to take"
        return self._closing

    def take(self, seconds: float = 0.0) -> list[ProbedRequest] | None:
        """As `Source` has it. Raises RunError where the process ended, and what its survey
        raised."""
        if self.closed or not self._pipe.poll(seconds):
            return None
        answer = self._answer()
        if isinstance(answer, list):
            self._handed_on += b"".join(bytes.fromhex(found.request_id) for found in answer)
            return answer
        self._closing = answer
        return None

    def _start_process(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(ROOT), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the driver's own ends with its JSON
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # what a terminal sends is for the driver, which ends this one
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._tell((*self._asked, self._wary))

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_answer` says why
            self._pipe.send(message)

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._again(self._process.wait())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _again(self, status: int) -> list[ProbedRequest]:
        """Reads the rest with care, if a signal has ended the process, and that for the first
        time."""
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        if status >= 0 or self._wary or not self._begun:
            raise RunError(f"the process that reads the input was ended {how}; {RESUME_HINT}")
        logger.warning(
            "the process that reads the input was ended %s: each file apart from now on", how
        )
        self._end()
        self._wary = True
        self._start_process()
        self._facts = self._answer()
        done, failed = self._rows
        self._tell((done + self._handed_on, failed))
        return []

    def __enter__(self) -> SubprocessSurvey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
