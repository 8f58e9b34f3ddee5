"""Does the work of a survey, see `pipeline.intake.survey`. Needs PyTorch and transformers, which
count the tokens of prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from itertools import islice
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from pipeline.config import Job, draft_of, model_path
from pipeline.intake import requests
from pipeline.intake.prefetch import Prefetcher, Source
from pipeline.intake.requests import (
    ProbeAll,
    RequestStream,
    open_job_manifest,
    plan_in_batches,
    resolve_max_model_len,
)
from pipeline.intake.survey import InputTotals, JobFacts, RowIds, SurveyTask
from pipeline.output.ledger import split_fingerprints
from pipeline.records import ProbedRequest, RequestError, RunError, UsageError
from pipeline.video import isolated_probe
from std_core.cost_model.device_specs import local_device
from std_core.model.checkpoint import Checkpoint
from std_core.model.tensor_parallel import unshardable_reason

PREFETCHED_BATCHES = 4


class BlockingSurvey:
    """Surveys a job in the calling thread. Raises UsageError for an invalid model or input, or a
    draft that does not fit the model.

    Args:
        probe_all: reads headers.
    """

    def __init__(self, job: Job, prompts: Sequence[str], probe_all: ProbeAll = requests.probe_all):
        self.probe_all = probe_all
        self.job = job
        self.checkpoint = _load_checkpoint(job)
        _check_draft(job, self.checkpoint)
        max_model_len = resolve_max_model_len(job, self.checkpoint)
        self.manifest = open_job_manifest(job, prompts)
        self.facts = JobFacts(
            revision=self.checkpoint.revision,
            max_model_len=max_model_len,
            model_size=self.checkpoint.model_size(job.dtype),
            samples_by_default=self.checkpoint.samples_by_default,
            device=local_device("cuda" if torch.cuda.is_available() else "cpu"),
            input_schema=self.manifest.input_schema,
        )
        self.totals = InputTotals(0, 0)  # of what was read so far

    def plan_requests(
        self, done: Set[bytes] = frozenset(), failed: Set[bytes] = frozenset()
    ) -> Iterator[list[ProbedRequest]]:
        """Plans the requests of the input in batches; arguments as `Survey.start` has them."""
        stream = RequestStream(
            islice(self.manifest.rows(), self.job.limit),
            job=self.job,
            revision=self.facts.revision,
            ids=set(),
            probe_all=self.probe_all,
        )
        pending = stream.pending(done)
        yield from plan_in_batches(pending, self.job, self.checkpoint, self.probe_all)
        self.totals = InputTotals(len(stream.ids), len(stream.ids & failed))


class InProcessSurvey:
    """A `Survey` in a thread of this process."""

    def __init__(self, job: Job, prompts: Sequence[str], probe_all: ProbeAll = requests.probe_all):
        self._survey = BlockingSurvey(job, prompts, probe_all)
        self._batches: Prefetcher[list[ProbedRequest]] | None = None

    @property
    def facts(self) -> JobFacts:
        return self._survey.facts

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        # copies, since the caller's sets change while the thread reads them
        batches = self._survey.plan_requests(frozenset(done), frozenset(failed))
        self._batches = Prefetcher(batches, PREFETCHED_BATCHES)
        return self._batches

    @property
    def totals(self) -> InputTotals:
        return self._survey.totals

    def __enter__(self) -> InProcessSurvey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._batches is not None:
            self._batches.close()


def _load_checkpoint(job: Job) -> Checkpoint:
    """The job's checkpoint, without weights. Raises UsageError if it cannot be loaded, takes no
    video, or cannot be split over the job's tensor-parallel ranks."""
    try:
        checkpoint = Checkpoint.load(model_path(job.model))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not checkpoint.supports_video:
        raise UsageError(
            f"model {job.model!r} is a {checkpoint.config.model_type}, which takes no video"
        )
    if reason := unshardable_reason(checkpoint.config, job.tensor_parallel_size):
        raise UsageError(f"--tensor-parallel-size is {job.tensor_parallel_size}: {reason}")
    return checkpoint


def _check_draft(job: Job, checkpoint: Checkpoint) -> None:
    """Raises UsageError for a draft model that cannot draft for the job's model."""
    draft = draft_of(job)
    if draft is not None and draft.model:
        try:
            Checkpoint.load(model_path(draft.model)).check_can_draft_for(checkpoint)
        except ValueError as error:
            raise UsageError(f"--draft {job.draft}: {error}") from error


# --------------------------------------------------------------------------------- the subprocess


def serve(pipe: int) -> None:
    """Runs the process of a `SubprocessSurvey`, whose docstring describes the messages.

    Args:
        pipe: file descriptor of the connection to the driver.
    """
    connection = Connection(pipe)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver ended
        try:
            _answer(connection)
        except (UsageError, RequestError, RunError) as error:
            connection.send(error)


def _answer(connection: Connection) -> None:
    task: SurveyTask = connection.recv()
    probe_all = isolated_probe.probe_all if task.isolate_probes else requests.probe_all
    with InProcessSurvey(task.job, task.prompts, probe_all) as survey:
        connection.send(survey.facts)
        row_ids: RowIds = connection.recv()
        batches = survey.start(
            set(split_fingerprints(row_ids.done)), set(split_fingerprints(row_ids.failed))
        )
        while not batches.closed:
            if batch := batches.take(1.0):
                connection.send(batch)
        connection.send(survey.totals)
