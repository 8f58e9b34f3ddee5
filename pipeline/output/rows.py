"""One request's row, and a run's summary: what the output contract says of them, from the records
of the pipeline."""

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
    InputRow,
    RequestError,
    VideoInfo,
)
from std_core.types import Draft, Result

STATUS = {"stop": "success", "length": "truncated", "error": "error"}


@dataclass(frozen=True)
class Provenance:
    """What is the same in every row of a run."""

    job: Job
    revision: str
    draft: Draft | None

    @property
    def columns(self) -> dict[str, Any]:
        model = {"model": self.job.model, "model_revision": self.revision}
        return {**model, "draft": draft_name(self.job, self.draft)}


def about(job: Job, draft: Draft | None) -> dict[str, Any]:
    """What a run's record says of its job."""
    gamma = None if draft is None else draft.gamma
    return {
        "model": job.model,
        "draft": draft_name(job, draft),
        "gamma": gamma,
        "max_num_seqs": job.max_num_seqs,
    }


def draft_name(job: Job, draft: Draft | None) -> str:
    """As rows have it."""
    if draft is None:
        return "dense"
    chosen = draft.policy if draft.weights == "full" else f"{draft.policy}_{draft.weights}"
    return chosen if job.draft == "auto" else job.draft


def answered(run: Provenance, answer: CompletedRequest) -> dict[str, Any]:
    """The row of a request that reached the decoder."""
    planned = answer.request
    result = answer.result
    row = run.columns | _asked(
        run.job, planned.request_id, planned.input_row, planned.info, window=planned.window
    )
    row |= {"draft": draft_name(run.job, answer.draft), "attempts": answer.attempts}
    row |= {"planned_visual_tokens": planned.frame_plan.tokens, **_seen(answer.frames)}
    if result.error is not None:
        return row | _error(result.error)
    return row | _written(result)


def failed(run: Provenance, failure: FailedRequest) -> dict[str, Any]:
    """The row of a request that was given up before its frames were decoded."""
    pending = failure.pending
    asked = _asked(
        run.job, pending.request_id, pending.input_row, failure.info, window=pending.window
    )
    return run.columns | {"attempts": 1} | asked | _error(failure.error)


def _asked(
    job: Job,
    request_id: str,
    item: InputRow,
    info: VideoInfo | None,
    window: tuple[float, float] | None,
) -> dict[str, Any]:
    start, end = window or (job.frames.video_start, job.frames.video_end)
    return {
        **item.columns,
        "request_id": request_id,
        "video_uri": storage.redact_utf8(item.video_uri),
        "prompt": item.prompt,
        "video_start": start or 0.0,
        "video_end": end if info is None else min(end or info.duration, info.duration),
        "rotation": None if info is None else info.rotation,
    }


def _seen(frames: Frames | None) -> dict[str, Any]:
    if frames is None:
        return {}
    return {
        "frame_pts": list(frames.pts),
        "sampled_fps": frames.fps,
        "frames_lost": frames.frames_lost,
        "decoder": frames.decoder,
    }


def _error(error: RequestError) -> dict[str, Any]:
    return {
        "status": "error",
        "finish_reason": "error",
        "error_code": error.code,
        "error_message": error.message,
    }


def _written(result: Result) -> dict[str, Any]:
    return {
        "status": STATUS[result.finish_reason],
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


def summary(
    requests: int, errors: int, totals: Mapping[str, float], seconds: float, decoded: int
) -> dict[str, Any]:
    """A run's summary.

    Args:
        requests, errors: of this run's input, those done earlier included.
        totals: sums over the output's rows, as the sink keeps them.
        seconds: wall time of this run.
        decoded: videos that this run decoded.
    """
    written = totals["requests"] - totals["errors"]
    return {
        "requests": requests,
        "new": int(totals["new"]),
        "errors": errors,
        "tokens": int(totals["num_generated_tokens"]),
        "accepted_per_round": _share(totals["accepted"], totals["rounds"]),
        "kv_keep": _share(totals["kv_keep"], written),  # mean over the rows
        "videos_decoded": decoded,
        "vision_s": round(totals["vision_s"], 3),
        "prefill_s": round(totals["prefill_s"], 3),
        "decode_s": round(totals["decode_s"], 3),
        "seconds": round(seconds, 3),
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
