"""One request's row and a run's summary, in the columns and keys of the output contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import storage
from pipeline.config import Job
from pipeline.records import (
    CompletedRequest,
    FailedRequest,
    Frames,
    PendingRequest,
    RequestError,
    VideoInfo,
)
from std_core.types import Draft, Result

STATUS_OF_FINISH_REASON = {"stop": "success", "length": "truncated", "error": "error"}


@dataclass(frozen=True)
class Provenance:
    """What all rows of a run have in common.

    Args:
        revision: of the model's checkpoint.
        draft: of the job; None decodes densely.
    """

    job: Job
    revision: str
    draft: Draft | None

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "model": self.job.model,
            "model_revision": self.revision,
            "draft": requested_draft(self.job, self.draft),
        }


def run_metadata(job: Job, draft: Draft | None) -> dict[str, Any]:
    """The part of a run's log that describes its job."""
    return {
        "model": job.model,
        "draft": requested_draft(job, draft),
        "gamma": None if draft is None or job.draft == "auto" else draft.gamma,
        "max_num_seqs": job.max_num_seqs,
    }


def requested_draft(job: Job, draft: Draft | None) -> str:
    """What a job asks for: `dense`, the name given with `--draft`, or `auto`. Also the column
    `draft` of a request that failed before a draft was chosen."""
    return "dense" if draft is None else job.draft


def draft_name(job: Job, draft: Draft | None) -> str:
    """The column `draft`: `dense`, the name given with `--draft`, or for `auto` the policy and
    weights."""
    if draft is None:
        return "dense"
    if job.draft != "auto":
        return job.draft
    return draft.policy if draft.weights == "full" else f"{draft.policy}_{draft.weights}"


def completed_row(run: Provenance, completed: CompletedRequest) -> dict[str, Any]:
    """The row of a request that was handed to an engine or whose frames could not be decoded."""
    request = completed.request
    result = completed.result
    pending = PendingRequest(request.request_id, request.input_row, request.window)
    row = run.columns | _request_columns(run.job, pending, request.info)
    row |= {
        "draft": draft_name(run.job, completed.draft),
        "attempts": completed.attempts,
        "planned_visual_tokens": request.frame_plan.tokens,
    }
    if completed.frames is not None:
        row |= _frame_columns(completed.frames)
    if result.error is not None:
        return row | _error_columns(result.error)
    return row | _result_columns(result)


def failed_row(run: Provenance, failure: FailedRequest) -> dict[str, Any]:
    """The row of a request that failed before its frames were decoded."""
    request_columns = _request_columns(run.job, failure.pending, failure.info)
    return run.columns | {"attempts": 1} | request_columns | _error_columns(failure.error)


def _request_columns(job: Job, request: PendingRequest, info: VideoInfo | None) -> dict[str, Any]:
    start, end = request.window or (job.frames.video_start, job.frames.video_end)
    columns = {
        **request.input_row.columns,
        "request_id": request.request_id,
        "video_uri": storage.redact_utf8(request.input_row.video_uri),
        "prompt": request.input_row.prompt,
        "video_start": start or 0.0,
        "video_end": end,
        "rotation": None,
    }
    if info is not None:
        columns["video_end"] = min(end or info.duration, info.duration)
        columns["rotation"] = info.rotation
    return columns


def _frame_columns(frames: Frames) -> dict[str, Any]:
    return {
        "frame_pts": list(frames.pts),
        "sampled_fps": frames.fps,
        "frames_lost": frames.frames_lost,
        "decoder": frames.decoder,
    }


def _error_columns(error: RequestError) -> dict[str, Any]:
    return {
        "status": "error",
        "finish_reason": "error",
        "error_code": error.code,
        "error_message": storage.redact_text(error.message),
    }


def _result_columns(result: Result) -> dict[str, Any]:
    return {
        "status": STATUS_OF_FINISH_REASON[result.finish_reason],
        "finish_reason": result.finish_reason,
        "text": result.text,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_visual_tokens": result.num_visual_tokens,
        "num_generated_tokens": len(result.token_ids),
        "kv_keep": result.kv_keep,
        "weight_keep": result.weight_keep,
        "gamma": result.proposed / result.rounds if result.rounds else 0.0,
        "rounds": result.rounds,
        "proposed": result.proposed,
        "accepted": result.accepted,
        "vision_s": result.vision_s,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
    }


def run_summary(
    requests: int, errors: int, totals: Mapping[str, float], seconds: float, decoded: int
) -> dict[str, Any]:
    """A run's summary.

    Args:
        requests, errors: of this run's input, those of earlier runs included.
        totals: sums over the output's rows, as `OutputWriter.totals` has them.
        seconds: wall time of this run.
        decoded: videos that this run decoded.
    """
    rows_with_text = totals["requests"] - totals["errors"]
    return {
        "requests": requests,
        "new": int(totals["new"]),
        "errors": errors,
        "tokens": int(totals["num_generated_tokens"]),
        "accepted_per_round": _ratio(totals["accepted"], totals["rounds"]),
        "kv_keep": _ratio(totals["kv_keep"], rows_with_text),  # mean over the rows
        "videos_decoded": decoded,
        "vision_s": round(totals["vision_s"], 3),
        "prefill_s": round(totals["prefill_s"], 3),
        "decode_s": round(totals["decode_s"], 3),
        "seconds": round(seconds, 3),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
