"""A job from its command line to its exit code: 0 every request has a row, 1 stopped early and a rerun resumes, 2 the
configuration or the input is wrong and nothing was started, 3 more requests failed than allowed."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import dryrun, rows
from pipeline.ahead import Ahead
from pipeline.config import DEFAULT_PROMPT, Job, draft_of, model_path, parse_job
from pipeline.ledger import LeaseLost
from pipeline.prepare import Failed, Pending, Requests, manifest_of, waves, window_of
from pipeline.sink import Output, open_output
from pipeline.types import Frames, Planned, RequestError, RunError, UsageError, Wave
from std_core.checkpoint import Checkpoint
from std_core.types import Draft, Result

MADE = 16  # waves and failures that are made ahead


def main(argv: Sequence[str], prog: str, default_prompt: str = DEFAULT_PROMPT, dry: bool = False) -> int:
    """Runs a job, prints its JSON as the last line of standard output, and returns the exit code.

    Args:
        default_prompt: asked where neither the command line nor the input asks anything.
        dry: only plans, and needs no output.
    """
    return guarded(prog, lambda: _main(argv, prog, default_prompt, dry))


def guarded(prog: str, work: Callable[[], int]) -> int:
    """Turns the ways in which a run ends early into an exit code and one sentence on standard error."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return work()
    except UsageError as error:
        return _say(prog, str(error), 2)
    except (RunError, LeaseLost) as error:
        return _say(prog, str(error), 1)
    except RequestError as error:
        return _say(prog, f"storage failed: {error.message}; the same command resumes", 1)
    except KeyboardInterrupt:
        return _say(prog, "stopped; the same command resumes", 1)


def _say(prog: str, sentence: str, code: int) -> int:
    print(f"{prog}: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    return code


def _main(argv: Sequence[str], prog: str, default_prompt: str, dry: bool) -> int:
    job = parse_job(argv, prog, needs=("input",) if dry else ("input", "output"))
    if dry or job.dry_run:
        return plan_job(job, default_prompt)
    result = run_job(job, default_prompt)
    print(json.dumps(result), flush=True)
    return 3 if result["errors"] > job.max_error_fraction * result["requests"] else 0


def load(job: Job) -> Checkpoint:
    """The job's checkpoint, without weights. Raises UsageError where it cannot be loaded or takes no video."""
    try:
        checkpoint = Checkpoint.load(model_path(job.model))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not checkpoint.takes_video:
        raise UsageError(f"model {job.model!r} is a {checkpoint.config.model_type}, which takes no video")
    return checkpoint


def draft_for(job: Job, checkpoint: Checkpoint) -> Draft | None:
    """The job's draft, if it can draft for the job's model. Raises UsageError."""
    draft = draft_of(job)
    if draft is not None and draft.model:
        try:
            Checkpoint.load(model_path(draft.model)).check_drafts_for(checkpoint)
        except ValueError as error:
            raise UsageError(f"--draft {job.draft}: {error}") from error
    return draft


def prompts_of(job: Job, default_prompt: str) -> tuple[str, ...]:
    """What each video is asked. Raises UsageError for a file of prompts that cannot be read."""
    if not job.prompts:
        return job.prompt or ((default_prompt,) if default_prompt else ())
    try:
        lines = Path(job.prompts).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {job.prompts!r} cannot be read: {error}") from error
    if not any(lines):
        raise UsageError(f"--prompts {job.prompts!r} holds no prompt")
    return (*job.prompt, *filter(None, lines))


def plan_job(job: Job, default_prompt: str) -> int:
    """Prints what the job would do; the last line is JSON."""
    checkpoint = load(job)
    draft_for(job, checkpoint), window_of(job, checkpoint)  # what is wrong for a run is wrong for its plan
    manifest = manifest_of(job, prompts_of(job, default_prompt))
    requests = Requests(islice(manifest.items(), job.limit), job, checkpoint.revision, set())
    failed: list[Failed] = []
    planned = list(waves(requests.without_row(frozenset()), job, checkpoint, failed.append))
    report = dryrun.report(planned, failed)
    print(dryrun.table(report, failed))
    print(json.dumps(report), flush=True)
    return 0


def run_job(job: Job, default_prompt: str = DEFAULT_PROMPT, **driving: Any) -> dict[str, Any]:
    """Answers what has no row yet, and returns the summary that it also writes to the output; `driving` are keywords of
    `pipeline.run.drive`.

    Raises:
        UsageError: before anything is started. RunError, LeaseLost, RequestError: the run ended early and resumes.
    """
    began = time.monotonic()
    checkpoint = load(job)
    draft = draft_for(job, checkpoint)
    window = window_of(job, checkpoint)
    manifest = manifest_of(job, prompts_of(job, default_prompt))
    options: dict[str, Any] = {"retry_failed": job.retry_failed, "rows_per_part": job.rows_per_part}
    with open_output(job.output, manifest.input_schema, **options) as output:
        requests = Requests(islice(manifest.items(), job.limit), job, checkpoint.revision, set())
        recorder = _Recorder(output, rows.Provenance(job, checkpoint.revision, draft))
        before = output.done & output.failed  # error rows that stay
        pending = requests.without_row(frozenset(output.done))
        with Ahead[Wave | Failed](lambda found: _look(pending, job, checkpoint, found), MADE) as made:
            todo, decoded = _Waves(made, recorder.failed), 0
            if todo.first():
                from pipeline.run import drive  # starts Ray's machinery, which a run without work does without

                decoded = drive(job, draft, todo, window, recorder.answered, tick=output.flush_due, **driving)
        output.flush()
        errors = len(before & requests.ids) + recorder.errors
        result = rows.summary(len(requests.ids), errors, output.totals, time.monotonic() - began, decoded)
        output.write_summary(result)
    return result


def _look(pending: Iterable[Pending], job: Job, checkpoint: Checkpoint, found: Callable[[Wave | Failed], None]) -> None:
    for wave in waves(pending, job, checkpoint, found):
        found(wave)


class _Waves:
    """Waves while headers are read; the failures that come between them are written down where waves are taken."""

    def __init__(self, made: Ahead[Wave | Failed], failed: Callable[[Failed], None]):
        self._made, self._failed, self._first = made, failed, deque[Wave]()

    def first(self) -> bool:
        """Waits for the first wave; False if there is none."""
        while not self.closed and not self._first:
            self._first.extend(filter(None, [self._pass(1.0)]))
        return bool(self._first)

    @property
    def closed(self) -> bool:
        """Whether all were taken."""
        return self._made.closed and not self._first

    def take(self) -> Wave | None:
        """The next one, if there is one by now."""
        return self._first.popleft() if self._first else self._pass(0.0)

    def _pass(self, seconds: float) -> Wave | None:
        while isinstance(found := self._made.take(seconds), Failed):
            self._failed(found)
        return found


class _Recorder:
    """Writes rows and counts those that are errors."""

    def __init__(self, output: Output, run: rows.Provenance):
        self.output, self.run, self.errors = output, run, 0

    def failed(self, failure: Failed) -> None:
        self._add(rows.failed(self.run, failure))

    def answered(self, planned: Planned, frames: Frames | None, result: Result, attempts: int) -> None:
        self._add(rows.answered(self.run, planned, frames, result, attempts))

    def _add(self, row: dict[str, Any]) -> None:
        self.errors += row["status"] == "error"
        self.output.add(row)
