"""What a job says of its waves, and what a wave's requests come to in sums: what a choice is made
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config import Job
from pipeline.plan.history import kind_of
from pipeline.records import PlannedRequest
from std_core.cost_model.memory import LongestRequest, SamplingMode
from std_core.types import Draft

STANDARD = Draft()


@dataclass(frozen=True)
class WaveConfig:
    """What a job says of its waves.

    Args:
        max_num_seqs: slots at most.
        draft: used ungated; None decodes densely; `auto` is a choice.
        default: in the place of a choice where there is nothing to choose from.
        engines: that share the work.
        strict: tokens that each verification is padded to, if any.
        draws: how tokens are drawn, as `LongestRequest` has it.
    """

    max_num_seqs: int = 8
    max_tokens: int = 256
    prefill_chunk: int = 2048
    draft: Draft | Literal["auto"] | None = "auto"
    default: Draft = STANDARD
    engines: int = 1
    strict: int = 0
    draws: SamplingMode = "greedy"

    @property
    def drawn(self) -> bool:
        return self.draws != "greedy"


def wave_config_of(job: Job, draft: Draft | None, drawn: bool = False) -> WaveConfig:
    """A job's setting.

    Args: draft: as `draft_of` has it; a choice is left where `--draft` is `auto` and no number of a
        draft is given. drawn: whether texts are drawn where the job does not say.
    """
    given = (job.gamma, job.keep, job.k) != (None, None, None)
    greedy = not drawn if job.temperature is None else job.temperature == 0
    free = job.draft == "auto" and job.mode == "std" and not given
    return WaveConfig(
        job.max_num_seqs,
        job.max_tokens,
        draft="auto" if free else draft,
        default=draft or Draft(),
        strict=job.strict,
        draws="greedy" if greedy else "fresh" if job.seed is None else "seeded",
    )


@dataclass(frozen=True)
class WaveSummary:
    """A wave's requests in sums: means in tokens, kinds of prompt with their numbers. `longest` has
    the most visual tokens of any and the most text of any, since each of the two stores is as long
    as its longest row."""

    count: int
    context: float
    visual: float
    videos: int
    longest: LongestRequest
    kinds: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, requests: Sequence[PlannedRequest], setting: WaveConfig) -> WaveSummary:
        count = len(requests)
        visual = max(r.frame_plan.tokens for r in requests)
        text = max(r.context - r.frame_plan.tokens for r in requests)
        kinds: dict[str, int] = {}
        for request in requests:
            kind = kind_of(request.input_row.prompt)
            kinds[kind] = kinds.get(kind, 0) + 1
        return cls(
            count,
            sum(r.context for r in requests) / count,
            sum(r.frame_plan.tokens for r in requests) / count,
            len({(r.info.uri, r.frame_plan.times) for r in requests}),
            _load(visual + text, visual, setting),
            tuple(sorted(kinds.items())),
        )


def load_of(request: PlannedRequest, setting: WaveConfig) -> LongestRequest:
    return _load(request.context, request.frame_plan.tokens, setting)


def _load(context: int, visual: int, setting: WaveConfig) -> LongestRequest:
    return LongestRequest(
        context,
        visual=visual,
        max_tokens=setting.max_tokens,
        chunk=setting.prefill_chunk,
        strict_width=setting.strict,
        sampling=setting.draws,
    )
