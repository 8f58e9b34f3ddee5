"""A job from its command line to its exit code: 0 every request has a row, 1 stopped early and a
rerun resumes, 2 the configuration or the input is wrong and nothing was started, 3 more requests
failed than allowed."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import logs
from pipeline.config import DEFAULT_PROMPT, Job, draft_of, parse_job
from pipeline.intake.survey import JobFacts, SubprocessSurvey, Survey
from pipeline.output import rows
from pipeline.output.ledger import LeaseLost
from pipeline.output.writer import Output, await_output, open_output
from pipeline.plan import dryrun
from pipeline.plan.pool import Pool, fitting
from pipeline.plan.profile_file import profile_for, unfit_alone
from pipeline.plan.settings import wave_config_of
from pipeline.plan.waves import History, plan
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
    outlook = outlook_of(job, survey.facts)
    every = [one for batch in survey.plan_requests() for one in batch]
    failed = [one for one in every if isinstance(one, FailedRequest)]
    planned: list[PlannedRequest] = []
    for one in fitting(
        [one for one in every if isinstance(one, PlannedRequest)], outlook.profile, outlook.setting
    ):
        (failed if isinstance(one, FailedRequest) else planned).append(one)  # type: ignore[arg-type]
    report = dryrun.report(_waves(planned, outlook), failed, outlook)
    print(dryrun.table(report, failed))
    print(json.dumps(report), flush=True)
    return 0


def outlook_of(job: Job, facts: JobFacts) -> dryrun.Outlook:
    """What a plan's times are made from. Raises UsageError for a profile that is none, or is of
    something else."""
    profile = profile_for(
        job.profile, facts.revision, job.dtype, facts.model_size, at_hand=facts.device
    )
    draft = draft_of(job)
    if job.mode == "sparse" and draft is not None and (why := unfit_alone(profile, draft)):
        if job.profile:
            raise UsageError(f"--mode sparse is refused: {why}")
        logger.warning(
            "--mode sparse: nothing shows that its texts hold what is asked for: %s", why
        )
    return dryrun.Outlook(profile, wave_config_of(job, draft, facts.do_sample), job.price_per_hour)


def _waves(planned: Sequence[PlannedRequest], outlook: dryrun.Outlook) -> tuple[Wave, ...]:
    return plan(planned, outlook.profile, History(), max(1, len(planned)), True, outlook.setting)


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
    with survey(job, prompts_of(job, default_prompt)) as surveyor:
        await_output(job.output)  # meanwhile
        facts = surveyor.facts
        setting = outlook_of(
            job, facts
        ).setting  # what is wrong with a profile is said before anything starts
        profile_on = partial(profile_for, job.profile, facts.revision, job.dtype, facts.model_size)
        options: dict[str, Any] = {
            "retry_failed": job.retry_failed,
            "rows_per_part": job.rows_per_part,
        }
        with (
            open_output(job.output, facts.input_schema, **options) as output,
            RunMonitor(job.output, rows.about(job, draft), lambda: output.new) as monitor,
        ):
            recorder = _Recorder(output, rows.Provenance(job, facts.revision, draft), monitor)
            found = monitor.count_requests(surveyor.start(output.done, output.done & output.failed))
            pool = Pool(
                found,
                failed=recorder.failed,
                handed=monitor.record_wave,
                profile_on=profile_on,
                setting=setting,
            )
            decoded = 0
            while pool.waiting():
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
                    on_answer=recorder.answered,
                    observer=monitor,
                    on_step=output.flush_due,
                    **driving,
                )
            output.flush()
            totals = surveyor.totals
            errors = totals.failed + recorder.errors
            result = rows.summary(
                totals.requests, errors, output.totals, time.monotonic() - began, decoded=decoded
            )
            output.write_summary(result)
    return result


class _Recorder:
    """Writes rows, shows them to the monitor, and counts those that are errors."""

    def __init__(self, output: Output, run: rows.Provenance, monitor: RunMonitor):
        self.output = output
        self.run = run
        self.monitor = monitor
        self.errors = 0

    def failed(self, failure: FailedRequest) -> None:
        self._add(rows.failed(self.run, failure))

    def answered(self, answer: CompletedRequest) -> None:
        self._add(rows.answered(self.run, answer))

    def _add(self, row: dict[str, Any]) -> None:
        self.errors += row["status"] == "error"
        self.output.add(row)
        self.monitor.record_row(row)
