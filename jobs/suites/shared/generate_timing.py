"""Times of Hugging Face's `generate`, measured in segments of tokens; other loops can be timed
between two segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from jobs.suites.shared import reference
from jobs.suites.shared.timing import Stopwatch
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model


@dataclass
class GenerateTimes:
    """Seconds of one call of `generate`."""

    prefill_s: float = 0.0  # until the first token
    per_token: list[float] = field(default_factory=list)  # of a row, one value per segment


class _SegmentTimer(StoppingCriteria):
    """Called by `generate` after each step: times segments, runs `between` after each, and stops
    after the last."""

    def __init__(self, segment: int, count: int, between: Callable[[], None]):
        self.segment = segment  # tokens
        self.count = count  # segments
        self.between = between
        self.times = GenerateTimes()
        self.watch = Stopwatch()
        self.segment_start = 0  # length of the ids at which the segment began; 0 before the first

    def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        length = ids.shape[1]
        written = length - self.segment_start
        if not self.segment_start:
            self.times.prefill_s = self.watch.seconds
            self._begin_segment(length)
        elif written >= self.segment:
            self.times.per_token.append(self.watch.seconds / written)
            self.between()
            self._begin_segment(length)
        done = len(self.times.per_token) >= self.count
        return torch.full((len(ids),), done, dtype=torch.bool)

    def _begin_segment(self, length: int) -> None:
        self.segment_start = length
        self.watch.reset()


def time_generate(
    model: Model,
    prompts: Sequence[ModelInputs],
    segment: int,
    count: int,
    between: Callable[[], None],
) -> GenerateTimes:
    """Time greedy decoding of a batch of prompts of one length.

    Args:
        segment: tokens per row in a segment.
        count: segments.
        between: called after each segment; it may run the engine of the same model.
    """
    timer = _SegmentTimer(segment, count, between)
    return _generate(model, prompts, timer, max_tokens=(segment + 1) * (count + 1))


def time_prompt_lookup(model: Model, prompts: Sequence[ModelInputs], tokens: int) -> float:
    """Seconds per token of Hugging Face's prompt lookup decoding, which takes a single prompt."""
    timer = _SegmentTimer(tokens, 1, lambda: None)
    times = _generate(
        model, prompts, timer, max_tokens=2 * tokens + 16, prompt_lookup_num_tokens=10
    )
    return times.per_token[0]


def _generate(
    model: Model,
    prompts: Sequence[ModelInputs],
    timer: _SegmentTimer,
    max_tokens: int,
    **options: Any,
) -> GenerateTimes:
    batch = reference.hf_batch(model, prompts)
    timer.watch.reset()
    model.hf.generate(
        **batch,
        attention_mask=torch.ones_like(batch["input_ids"]),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        stopping_criteria=StoppingCriteriaList([timer]),
        **options,
    )
    return timer.times
