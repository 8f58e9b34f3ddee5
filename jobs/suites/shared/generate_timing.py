"""Hugging Face's own `generate` under the clock, with other work done in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from jobs.suites.shared import reference
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model


@dataclass
class Theirs:
    """Seconds: until the first token; per token of a row, of each segment."""

    prefill_s: float = 0.0
    per_token: list[float] = field(default_factory=list)


class _Clock(StoppingCriteria):
    """Asked after each step: ends segments, lets the other side have its turn, stops after the last
    of them."""

    def __init__(self, segment: int, count: int, turn: Callable[[], None]):
        self.segment = segment
        self.count = count
        self.turn = turn
        self.theirs = Theirs()
        self.began = time.perf_counter()
        self.first = 0
        self.at = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        now = time.perf_counter()
        if not self.first:
            self.theirs.prefill_s = now - self.began
            self.first = ids.shape[1]
            self.at = self.first
            self.began = time.perf_counter()
        elif ids.shape[1] - self.at >= self.segment:
            self.theirs.per_token.append((now - self.began) / (ids.shape[1] - self.at))
            self.turn()
            self.at = ids.shape[1]
            self.began = time.perf_counter()
        return torch.full((len(ids),), len(self.theirs.per_token) >= self.count, dtype=torch.bool)


def beside(
    model: Model, prompts: Sequence[ModelInputs], segment: int, count: int, turn: Callable[[], None]
) -> Theirs:
    """`generate` of a batch of prompts of one length, whose every segment is followed by a turn of
    ours."""

    def ours() -> None:
        model.install_attention()
        try:
            turn()
        finally:
            model.restore_attention()

    return _generate(model, prompts, _Clock(segment, count, ours), (segment + 1) * (count + 1))


def lookup(model: Model, prompts: Sequence[ModelInputs], tokens: int) -> float:
    """Seconds per token of its prompt lookup decoding, which takes a single prompt."""
    clock = _Clock(tokens, 1, lambda: None)
    return _generate(model, prompts, clock, 2 * tokens + 16, prompt_lookup_num_tokens=10).per_token[
        0
    ]


def _generate(
    model: Model, prompts: Sequence[ModelInputs], clock: _Clock, most: int, **how: Any
) -> Theirs:
    fed = reference.hf_batch(model.hf, prompts)
    mask = torch.ones_like(fed["input_ids"])
    model.restore_attention()
    try:
        clock.began = time.perf_counter()
        model.hf.generate(
            **fed,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=most,
            min_new_tokens=most,
            stopping_criteria=StoppingCriteriaList([clock]),
            **how,
        )
    finally:
        model.install_attention()
    return clock.theirs
