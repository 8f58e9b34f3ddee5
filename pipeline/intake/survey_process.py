"""A survey of a job: its model without weights, its input, and what headers say of the videos.
Needs PyTorch and transformers, which count the tokens of prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
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
from pipeline.intake.survey import InputTotals, JobFacts
from pipeline.output.ledger import split_fingerprints
from pipeline.records import (
    ProbedRequest,
    RequestError,
    RunError,
    UsageError,
)
from pipeline.video import isolated_probe
from std_core.cost_model.device_specs import local_device
from std_core.model.checkpoint import Checkpoint
from std_core.model.tensor_parallel import unshardable_reason

MADE = 4  # batches of headers that are read ahead


class BlockingSurvey:
    """A job's model and input. Raises UsageError for what is wrong with them, or with the job's
    draft for the model.

    Args:
        probed: reads headers.
    """

    def __init__(self, job: Job, prompts: Sequence[str], probe_all: ProbeAll = requests.probe_all):
        self.probe_all = probe_all
        self.job = job
        self.checkpoint = _load(job)
        _check_draft(job, self.checkpoint)
        window = resolve_max_model_len(job, self.checkpoint)
        manifest = open_job_manifest(job, prompts)
        here = local_device("cuda" if torch.cuda.is_available() else "cpu")
        revision = self.checkpoint.revision
        model_size = self.checkpoint.model_size(job.dtype)
        self.facts = JobFacts(
            revision,
            window,
            model_size,
            self.checkpoint.samples_by_default,
            here,
            manifest.input_schema,
        )
        self._items = manifest.items
        self.totals = InputTotals(0, 0)

    def plan_requests(
        self, done: Set[bytes] = frozenset(), failed: Set[bytes] = frozenset()
    ) -> Iterator[list[ProbedRequest]]:
        """As `Survey.start` has it, in batches; `totals` is of what was read."""
        items = islice(self._items(), self.job.limit)
        every = RequestStream(
            items, job=self.job, revision=self.facts.revision, ids=set(), probe_all=self.probe_all
        )
        yield from plan_in_batches(every.pending(done), self.job, self.checkpoint, self.probe_all)
        self.totals = InputTotals(len(every.ids), len(every.ids & failed))


class InProcessSurvey:
    """A `Survey` whose work is done by a thread of this process."""

    def __init__(self, job: Job, prompts: Sequence[str], probe_all: ProbeAll = requests.probe_all):
        self._survey = BlockingSurvey(job, prompts, probe_all)
        self.facts = self._survey.facts
        self._ahead: Prefetcher[list[ProbedRequest]] | None = None

    def start(self, done: Set[bytes], failed: Set[bytes]) -> Source[list[ProbedRequest]]:
        batches = self._survey.plan_requests(
            frozenset(done), frozenset(failed)
        )  # the sets may change meanwhile
        self._ahead = Prefetcher(lambda put: _each(put, batches), MADE)
        return self._ahead

    @property
    def totals(self) -> InputTotals:
        return self._survey.totals

    def __enter__(self) -> InProcessSurvey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._ahead is not None:
            self._ahead.close()


def _each(
    put: Callable[[list[ProbedRequest]], None], batches: Iterable[list[ProbedRequest]]
) -> None:
    for batch in batches:
        put(batch)


def _load(job: Job) -> Checkpoint:
    """The job's checkpoint, without weights. Raises UsageError where it cannot be loaded, takes no
    video or cannot be shared by so many GPUs."""
    try:
        checkpoint = Checkpoint.load(model_path(job.model))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not checkpoint.supports_video:
        raise UsageError(
            f"model {job.model!r} is a {checkpoint.config.model_type}, which takes no video"
        )
    if why := unshardable_reason(checkpoint.config, job.tensor_parallel_size):
        raise UsageError(f"--tensor-parallel-size is {job.tensor_parallel_size}: {why}")
    return checkpoint


def _check_draft(job: Job, checkpoint: Checkpoint) -> None:
    """Raises UsageError for a second model that cannot draft for the job's."""
    draft = draft_of(job)
    if draft is not None and draft.model:
        try:
            Checkpoint.load(model_path(draft.model)).check_can_draft_for(checkpoint)
        except ValueError as error:
            raise UsageError(f"--draft {job.draft}: {error}") from error


# ----------------------------------------------------------------------------- a process of its own


def serve(pipe: int) -> None:
    """The process's whole life: facts, then batches, then the closing; an error in the place of
    what it was to say."""
    connection = Connection(pipe)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver is gone
        try:
            _survey(connection)
        except (UsageError, RequestError, RunError) as error:
            connection.send(error)


def _survey(connection: Connection) -> None:
    job, prompts, wary = connection.recv()
    with InProcessSurvey(
        job, prompts, isolated_probe.probe_all if wary else requests.probe_all
    ) as here:
        connection.send(here.facts)
        done, failed = map(split_fingerprints, connection.recv())
        found = here.start(set(done), set(failed))
        while not found.closed:
            if batch := found.take(1.0):
                connection.send(batch)
        connection.send(here.totals)
