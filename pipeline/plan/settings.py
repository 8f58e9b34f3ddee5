"""What the planner knows of a job and of a wave: `WaveConfig` and `WaveSummary`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config import Job
from pipeline.plan.history import prompt_kind
from pipeline.records import PlannedRequest
from std_core.cost_model.memory import LongestRequest, SamplingMode
from std_core.types import Draft


@dataclass(frozen=True)
class WaveConfig:
    """The part of a job's configuration that its waves depend on.

    Args:
        max_num_seqs: upper bound of a wave's slots.
        draft: a given draft is always used; None decodes densely; `auto` leaves the choice to the
            planner.
        engines: engines that share the requests.
        strict: tokens per row that each verification is padded to; 0 pads nothing.
        sampling_mode: how tokens are sampled, as in `LongestRequest`.
    """

    max_num_seqs: int = 8
    max_tokens: int = 256
    prefill_chunk: int = 2048
    draft: Draft | Literal["auto"] | None = "auto"
    engines: int = 1
    strict: int = 0
    sampling_mode: SamplingMode = "greedy"

    @property
    def sampled(self) -> bool:
        return self.sampling_mode != "greedy"


def wave_config_of(job: Job, draft: Draft | None, sampled_by_default: bool = False) -> WaveConfig:
    """The wave configuration of a job.

    Args:
        draft: as `draft_of` resolves it. The planner chooses where `--draft` is `auto`, the mode is
            `std`, and none of `--gamma`, `--keep` and `--k` is given.
        sampled_by_default: whether the checkpoint samples where the job gives no temperature.
    """
    return WaveConfig(
        job.max_num_seqs,
        job.max_tokens,
        draft="auto" if _planner_chooses(job) else draft,
        strict=job.strict,
        sampling_mode=_sampling_mode(job, sampled_by_default),
    )


def _planner_chooses(job: Job) -> bool:
    if job.draft != "auto" or job.mode != "std":
        return False
    return job.gamma is None and job.keep is None and job.k is None


def _sampling_mode(job: Job, sampled_by_default: bool) -> SamplingMode:
    if job.temperature == 0 or (job.temperature is None and not sampled_by_default):
        return "greedy"
    return "fresh" if job.seed is None else "seeded"


@dataclass(frozen=True)
class WaveSummary:
    """A wave's requests as means and counts.

    Args:
        count: requests.
        context, visual: mean tokens per request: the whole context, and its visual tokens.
        videos: distinct videos, or windows of videos; each is prefilled once.
        longest: the most visual tokens of any request with the most text of any, since prefix and
            suffix are stored apart and each is as long as its longest row.
        kinds: (kind of prompt, requests), sorted.
    """

    count: int
    context: float
    visual: float
    videos: int
    longest: LongestRequest
    kinds: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, requests: Sequence[PlannedRequest], config: WaveConfig) -> WaveSummary:
        count = len(requests)
        visual = max(request.frame_plan.tokens for request in requests)
        text = max(request.context - request.frame_plan.tokens for request in requests)
        kinds = Counter(prompt_kind(request.input_row.prompt) for request in requests)
        return cls(
            count,
            context=sum(request.context for request in requests) / count,
            visual=sum(request.frame_plan.tokens for request in requests) / count,
            videos=len({(request.info.uri, request.frame_plan.times) for request in requests}),
            longest=_longest_request(visual + text, visual, config),
            kinds=tuple(sorted(kinds.items())),
        )


def longest_request(request: PlannedRequest, config: WaveConfig) -> LongestRequest:
    """The memory model's input for a wave in which no request is longer than this one."""
    return _longest_request(request.context, request.frame_plan.tokens, config)


def _longest_request(context: int, visual: int, config: WaveConfig) -> LongestRequest:
    return LongestRequest(
        context,
        visual=visual,
        max_tokens=config.max_tokens,
        chunk=config.prefill_chunk,
        strict_width=config.strict,
        sampling=config.sampling_mode,
    )
