"""A job from its command line to its exit code.

0: every request has a row. 1: the run ended early; the same command resumes. 2: configuration or
input is wrong; nothing was started. 3: finished, but more requests failed than allowed. 130:
stopped by Ctrl-C; the same command resumes.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import logs, storage
from pipeline.config import DEFAULT_PROMPT, Job, draft_of, parse_job
from pipeline.intake.survey import JobFacts, SubprocessSurvey, Survey
from pipeline.output import rows
from pipeline.output.folder import OutputFolder
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
    INTERRUPTED,
    CompletedRequest,
    FailedRequest,
    Interrupted,
    PlannedRequest,
    RequestError,
    RunError,
    UsageError,
)
from pipeline.report.monitor import RunMonitor

logger = logging.getLogger(__name__)


SurveyFactory = Callable[[Job, Sequence[str]], Survey]


def main(
    argv: Sequence[str],
    prog: str,
    description: str = "",
    default_prompt: str = DEFAULT_PROMPT,
    plan_only: bool = False,
    survey: SurveyFactory = SubprocessSurvey,
) -> int:
    """Run or plan the job of a command line; print its JSON as the last line of standard output.

    Args:
        argv: the words after the script's name.
        prog: the script's name, for messages and `--help`.
        description: text at the top of `--help`.
        default_prompt: used where neither the command line nor the input has a prompt.
        plan_only: plan, as with `--dry-run`; no output is needed.
        survey: see `run_job`.

    Returns:
        The exit code.
    """

    def work() -> int:
        required = ("input",) if plan_only else ("input", "output")
        job = parse_job(argv, prog, description, required=required)
        logs.configure(job.log_level)
        if plan_only or job.dry_run:
            return plan_job(job, default_prompt)
        summary = run_job(job, default_prompt, survey)
        print(json.dumps(summary), flush=True)
        return 3 if summary["errors"] > job.max_error_fraction * summary["requests"] else 0

    return run_guarded(prog, work)


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


def _terminate(*_: object) -> None:
    raise _Terminated


def run_guarded(prog: str, work: Callable[[], int]) -> int:
    """Call `work`; turn the errors that end a run early into an exit code and one log message.

    SIGTERM raises a KeyboardInterrupt of its own, so that code which ends for SIGINT ends for it.
    """
    logs.configure()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except UsageError as error:
        message = str(error)
        code = 2
    except Interrupted as error:
        message = str(error)
        code = INTERRUPTED if error.signal == signal.SIGINT else 1
    except RunError as error:  # LeaseLost included
        message = str(error)
        code = 1
    except RequestError as error:
        message = f"storage failed: {error.message}; the same command resumes"
        code = 1
    except _Terminated:
        message = "stopped by SIGTERM; the same command resumes"
        code = 1
    except KeyboardInterrupt:
        message = "stopped; the same command resumes"
        code = INTERRUPTED
    logger.error("%s: %s", prog, " ".join(message.split()))
    return code


# -------------------------------------------------------------------------------------------- plan


def plan_job(job: Job, default_prompt: str) -> int:
    """Print what the job would do, from headers alone; the last line is JSON.

    Raises:
        UsageError: whatever would end a run before it starts.
    """
    from pipeline.intake.survey_process import BlockingSurvey  # imports PyTorch

    survey = BlockingSurvey(job, _prompts(job, default_prompt))
    inputs = _planning_inputs(job, survey.facts)
    requests = [request for batch in survey.plan_requests() for request in batch]
    failed = [request for request in requests if isinstance(request, FailedRequest)]
    planned, too_large = split_by_capacity(
        [request for request in requests if isinstance(request, PlannedRequest)],
        Capacity(inputs.profile, inputs.config),
    )
    failed += too_large
    waves = plan(
        planned,
        inputs.profile,
        History(),
        idle_engines=max(1, len(planned)),
        closed=True,
        config=inputs.config,
    )
    report = dryrun.report(waves, failed, inputs)
    print(plan_table.table(report, failed))
    print(json.dumps(report), flush=True)
    return 0


def _prompts(job: Job, default_prompt: str) -> tuple[str, ...]:
    """The prompts put to each video: those of `--prompt` and `--prompts`, else the default."""
    if not job.prompts:
        return job.prompt or ((default_prompt,) if default_prompt else ())
    try:
        lines = Path(job.prompts).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {job.prompts!r} cannot be read: {error}") from error
    if not any(lines):
        raise UsageError(f"--prompts {job.prompts!r} contains no prompt")
    return (*job.prompt, *filter(None, lines))


def _profile_source(job: Job, facts: JobFacts) -> ProfileSource:
    return ProfileSource(job.profile, facts.revision, job.dtype, facts.model_size)


def _planning_inputs(job: Job, facts: JobFacts) -> PlanningInputs:
    """The device profile and the wave configuration of a job.

    Raises:
        UsageError: the profile cannot be read, or belongs to another model, precision or device.
    """
    profile = _profile_source(job, facts).on(facts.device)
    draft = draft_of(job)
    if job.mode == "sparse" and draft is not None:
        _check_sparse_mode(job, sparse_mode_objection(profile, draft))
    return PlanningInputs(
        profile, wave_config_of(job, draft, facts.samples_by_default), job.price_per_hour
    )


def _check_sparse_mode(job: Job, objection: str | None) -> None:
    """Refuse `--mode sparse` where the profile shows that the draft fails; without one, warn."""
    if objection and job.profile:
        raise UsageError(f"--mode sparse is refused: {objection}")
    if objection:
        logger.warning("--mode sparse: the quality of its texts is not measured: %s", objection)


# --------------------------------------------------------------------------------------------- run


def run_job(
    job: Job,
    default_prompt: str = DEFAULT_PROMPT,
    survey: SurveyFactory = SubprocessSurvey,
    **stand_ins: Any,
) -> dict[str, Any]:
    """Answer every request that has no row yet.

    Args:
        survey: reads model configuration, manifest and headers; `InProcessSurvey` suits a process
            that has loaded PyTorch anyway.
        stand_ins: `load`, `decode` and `limits` of `pipeline.driver.cluster.drive`.

    Returns:
        The summary, which is also written to the output.

    Raises:
        UsageError: before anything is started.
        RunError, LeaseLost, RequestError: the run ended early; a rerun resumes.
    """
    began = time.monotonic()
    storage.share_redaction_key()  # before the survey's process is started
    draft = draft_of(job)
    output = OutputFolder(job.output)
    output.check()
    with survey(job, _prompts(job, default_prompt)) as surveyor:
        wait_for_output(output)  # while the survey process loads
        facts = surveyor.facts
        config = _planning_inputs(job, facts).config  # refuses a profile that does not fit
        with (
            open_output(
                output,
                facts.input_schema,
                retry_failed=job.retry_failed,
                rows_per_part=job.rows_per_part,
            ) as writer,
            RunMonitor(job.output, rows.run_metadata(job, draft), lambda: writer.new) as monitor,
        ):
            recorder = _Recorder(writer, rows.Provenance(job, facts.revision, draft), monitor)
            requests = surveyor.start(writer.done, writer.done & writer.failed)
            pool = RequestPool(
                monitor.count_requests(requests),
                on_failed=recorder.failed,
                on_wave=monitor.record_wave,
                profile_on=_profile_source(job, facts).on,
                config=config,
            )
            decoded = 0
            while pool.poll():
                monitor.show_reading()
            if not pool.empty:
                from pipeline.driver.cluster import drive  # starts Ray, which a rerun may not need

                decoded = drive(
                    job,
                    pool,
                    max_model_len=facts.max_model_len,
                    on_completed=recorder.completed,
                    observer=monitor,
                    on_step=writer.flush_due,
                    **stand_ins,
                )
            writer.flush()
            summary = rows.run_summary(
                surveyor.totals.requests,
                surveyor.totals.failed + recorder.errors,
                writer.totals,
                time.monotonic() - began,
                decoded=decoded,
            )
            writer.write_summary(summary)
    return summary


class _Recorder:
    """Writes rows, shows them to the monitor, and counts error rows."""

    def __init__(self, writer: OutputWriter, provenance: rows.Provenance, monitor: RunMonitor):
        self.writer = writer
        self.provenance = provenance
        self.monitor = monitor
        self.errors = 0

    def failed(self, failure: FailedRequest) -> None:
        self._add(rows.failed_row(self.provenance, failure))

    def completed(self, completed: CompletedRequest) -> None:
        self._add(rows.completed_row(self.provenance, completed))

    def _add(self, row: dict[str, Any]) -> None:
        self.errors += row["status"] == "error"
        self.writer.add(row)
        self.monitor.record_row(row)
