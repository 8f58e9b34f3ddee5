"""A job from its command line to its exit code: 0 every request has a row, 1 stopped early and a
rerun resumes, 2 the configuration or the input is wrong and nothing was started, 3 more requests
failed than allowed."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import logs
from pipeline.config import DEFAULT_PROMPT, Job, draft_of, parse_job
from pipeline.intake.survey import JobFacts, SubprocessSurvey, Survey
from pipeline.output import rows
from pipeline.output.folder import OutputFolder
from pipeline.output.lease import LeaseLost
from pipeline.output.writer import OutputWriter, open_output, wait_for_output
from pipeline.plan import dryrun, plan_table
from pipeline.plan.capacity import Capacity
from pipeline.plan.dryrun import PlanningInputs
from pipeline.plan.history import History
from pipeline.plan.pool import RequestPool, split_by_capacity
from pipeline.plan.profile_file import ProfileSource, sparse_mode_objection
from pipeline.plan.settings import wave_config_of
from pipeline.plan.waves import plan
from pipeline.records import (
    CompletedRequest,
    FailedRequest,
    PlannedRequest,
    RequestError,
    RunError,
    UsageError,
    Wave,
)
from pipeline.report.monitor import RunMonitor

logger = logging.getLogger(__name__)


def main(
    argv: Sequence[str],
    prog: str,
    default_prompt: str = DEFAULT_PROMPT,
    dry: bool = False,
    survey: Callable[[Job, Sequence[str]], Survey] = SubprocessSurvey,
) -> int:
    """Runs a job, prints its JSON as the last line of standard output, and returns the exit code.

    Args:
        default_prompt: asked where neither the command line nor the input asks anything.
        dry: only plans, and needs no output.
        survey: see `run_job`.
    """
    return guarded(prog, lambda: _main(argv, prog, default_prompt, dry, survey=survey))


def guarded(prog: str, work: Callable[[], int]) -> int:
    """Turns the ways in which a run ends early into an exit code and one sentence on standard
    error."""
    logs.configure()
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
    logger.error("%s: %s", prog, " ".join(sentence.split()))
    return code


def _main(
    argv: Sequence[str],
    prog: str,
    default_prompt: str,
    dry: bool,
    survey: Callable[[Job, Sequence[str]], Survey],
) -> int:
    job = parse_job(argv, prog, required=("input",) if dry else ("input", "output"))
    if dry or job.dry_run:
        return plan_job(job, default_prompt)
    result = run_job(job, default_prompt, survey)
    print(json.dumps(result), flush=True)
    return 3 if result["errors"] > job.max_error_fraction * result["requests"] else 0


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
    """Prints what the job would do; the last line is JSON. What is wrong for a run is wrong for its
    plan."""
    from pipeline.intake.survey_process import BlockingSurvey  # needs PyTorch

    survey = BlockingSurvey(job, prompts_of(job, default_prompt))
    inputs = planning_inputs(job, survey.facts)
    requests = [request for batch in survey.plan_requests() for request in batch]
    failed = [request for request in requests if isinstance(request, FailedRequest)]
    planned, too_large = split_by_capacity(
        [request for request in requests if isinstance(request, PlannedRequest)],
        Capacity(inputs.profile, inputs.config),
    )
    failed += too_large
    report = dryrun.report(_waves(planned, inputs), failed, inputs)
    print(plan_table.table(report, failed))
    print(json.dumps(report), flush=True)
    return 0


def profile_source(job: Job, facts: JobFacts) -> ProfileSource:
    return ProfileSource(job.profile, facts.revision, job.dtype, facts.model_size)


def planning_inputs(job: Job, facts: JobFacts) -> PlanningInputs:
    """The device profile and the wave configuration of a job. Raises UsageError for a profile that
    cannot be read or belongs to another model, precision or device."""
    profile = profile_source(job, facts).on(facts.device)
    draft = draft_of(job)
    if (
        job.mode == "sparse"
        and draft is not None
        and (why := sparse_mode_objection(profile, draft))
    ):
        if job.profile:
            raise UsageError(f"--mode sparse is refused: {why}")
        logger.warning(
            "--mode sparse: nothing shows that its texts hold what is asked for: %s", why
        )
    return PlanningInputs(
        profile, wave_config_of(job, draft, facts.samples_by_default), job.price_per_hour
    )


def _waves(planned: Sequence[PlannedRequest], inputs: PlanningInputs) -> tuple[Wave, ...]:
    return plan(
        planned,
        inputs.profile,
        History(),
        idle_engines=max(1, len(planned)),
        closed=True,
        config=inputs.config,
    )


def run_job(
    job: Job,
    default_prompt: str = DEFAULT_PROMPT,
    survey: Callable[[Job, Sequence[str]], Survey] = SubprocessSurvey,
    **driving: Any,
) -> dict[str, Any]:
    """Answers what has no row yet, and returns the summary that it also writes to the output.

    Args: survey: where the input is read; `pipeline.intake.survey_process.InProcessSurvey` in a
        process that has PyTorch loaded anyway. driving: keywords of
        `pipeline.driver.cluster.drive`.

    Raises: UsageError: before anything is started. RunError, LeaseLost, RequestError: the run ended
        early and resumes.
    """
    began = time.monotonic()
    draft = draft_of(job)
    output = OutputFolder(job.output)
    with survey(job, prompts_of(job, default_prompt)) as surveyor:
        wait_for_output(output)  # while the survey process loads
        facts = surveyor.facts
        config = planning_inputs(job, facts).config  # a wrong profile is refused here
        options: dict[str, Any] = {
            "retry_failed": job.retry_failed,
            "rows_per_part": job.rows_per_part,
        }
        with (
            open_output(output, facts.input_schema, **options) as writer,
            RunMonitor(job.output, rows.run_metadata(job, draft), lambda: writer.new) as monitor,
        ):
            recorder = _Recorder(writer, rows.Provenance(job, facts.revision, draft), monitor)
            found = monitor.count_requests(surveyor.start(writer.done, writer.done & writer.failed))
            pool = RequestPool(
                found,
                on_failed=recorder.failed,
                on_wave=monitor.record_wave,
                profile_on=profile_source(job, facts).on,
                config=config,
            )
            decoded = 0
            while pool.poll():
                monitor.show_reading()
            if not pool.empty:
                # starts Ray's machinery, which a run without work does without
                from pipeline.driver.cluster import (
                    drive,
                )

                decoded = drive(
                    job,
                    pool,
                    max_model_len=facts.max_model_len,
                    on_completed=recorder.answered,
                    observer=monitor,
                    on_step=writer.flush_due,
                    **driving,
                )
            writer.flush()
            totals = surveyor.totals
            errors = totals.failed + recorder.errors
            result = rows.run_summary(
                totals.requests, errors, writer.totals, time.monotonic() - began, decoded=decoded
            )
            writer.write_summary(result)
    return result


class _Recorder:
    """Writes rows, shows them to the monitor, and counts those that are errors."""

    def __init__(self, writer: OutputWriter, run: rows.Provenance, monitor: RunMonitor):
        self.writer = writer
        self.run = run
        self.monitor = monitor
        self.errors = 0

    def failed(self, failure: FailedRequest) -> None:
        self._add(rows.failed_row(self.run, failure))

    def answered(self, completed: CompletedRequest) -> None:
        self._add(rows.completed_row(self.run, completed))

    def _add(self, row: dict[str, Any]) -> None:
        self.errors += row["status"] == "error"
        self.writer.add(row)
        self.monitor.record_row(row)
