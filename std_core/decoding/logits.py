"""Logits processors for all rows of a batch at once, with lengths on the device.

Gives the same bits as `token_sampling.process_logits`, which applies transformers' own processors
row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from std_core.decoding.token_sampling import ResolvedSampling


@dataclass
class _RowProcessors:
    """One row's parameters; the defaults change nothing."""

    repetition_penalty: float = 1.0
    min_length: int = 0
    temperature: float = 1.0
    top_k: int = 0
    tail: float = -1.0
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, processors: Sequence[LogitsProcessor], vocabulary: int) -> _RowProcessors | None:
        """Read the parameters of transformers' processors; None if one is not supported."""
        row = cls()
        for processor in processors:
            if (
                isinstance(processor, RepetitionPenaltyLogitsProcessor)
                and processor.prompt_ignore_length is None
            ):
                row.repetition_penalty = processor.penalty
            elif isinstance(processor, MinNewTokensLengthLogitsProcessor):
                row.min_length = processor.prompt_length_to_skip + processor.min_new_tokens
                row.stop_ids = tuple(processor.eos_token_id.tolist())
            elif isinstance(processor, TemperatureLogitsWarper):
                row.temperature = processor.temperature
            elif isinstance(processor, TopKLogitsWarper):
                row.top_k = min(processor.top_k, vocabulary)
            elif isinstance(processor, TopPLogitsWarper) and processor.min_tokens_to_keep == 1:
                row.tail = 1 - processor.top_p
            else:
                return None
        return row


@dataclass(frozen=True)
class LogitsProcessors:
    """Parameters of each row (B,); rows without a processor have the value that changes nothing.

    Args:
        repetition_penalty: 1 changes nothing.
        min_length: tokens of prompt and output before which the row may not stop; 0 changes
            nothing.
        temperature: 1 changes nothing.
        top_k: 0 changes nothing.
        tail: 1 - top_p, the probability mass that is cut off; -1 changes nothing.
        stop_ids: (B, n) ids that `min_length` suppresses, padded with the row's first id, or with 0
            in rows without any.
        has_repetition_penalty, has_min_length, has_temperature, has_top: whether any row has one;
            processors that no row has are skipped.
    """

    repetition_penalty: torch.Tensor
    min_length: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    tail: torch.Tensor
    stop_ids: torch.Tensor
    has_repetition_penalty: bool
    has_min_length: bool
    has_temperature: bool
    has_top: bool

    @classmethod
    def of(
        cls, samplings: Sequence[ResolvedSampling | None], vocabulary: int, device: torch.device
    ) -> LogitsProcessors | None:
        """Collect the rows' parameters; None if a row has a processor that is not supported."""
        rows = []
        for sampling in samplings:
            row = _RowProcessors.of(sampling.processors if sampling else [], vocabulary)
            if row is None:
                return None
            rows.append(row)

        def floats(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            repetition_penalty=floats([row.repetition_penalty for row in rows]),
            min_length=torch.tensor([row.min_length for row in rows], device=device),
            temperature=floats([row.temperature for row in rows]),
            top_k=torch.tensor([row.top_k for row in rows], device=device),
            tail=floats([row.tail for row in rows]),
            stop_ids=torch.tensor(_padded([row.stop_ids for row in rows]), device=device),
            has_repetition_penalty=any(row.repetition_penalty != 1 for row in rows),
            has_min_length=any(row.min_length for row in rows),
            has_temperature=any(row.temperature != 1 for row in rows),
            has_top=any(row.top_k or row.tail >= 0 for row in rows),
        )

    @property
    def flags(self) -> tuple[bool, ...]:
        """Which processors run."""
        return (
            self.has_repetition_penalty,
            self.has_min_length,
            self.has_temperature,
            self.has_top,
        )

    def apply(
        self, logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Process logits, partly in place; see `token_sampling.process_logits`.

        Args:
            logits: (B, T, vocabulary).
            history: (B, capacity) token ids.
            lengths: (B,) tokens of the history before the first position; each further position
                has one more.

        Returns:
            float32 scores.
        """
        scores = logits.float()
        if self.has_repetition_penalty:
            scores = self._penalize_repetition(scores, history, lengths)
        if self.has_min_length:
            scores = self._suppress_stops(scores, lengths)
        if self.has_temperature:
            scores = scores.div_(self.temperature[:, None, None])
        if self.has_top:
            # position by position: sorting takes seven times the bytes of the scores
            for t in range(scores.shape[1]):
                scores[:, t] = self._cut_tail(scores[:, t])
        return scores

    def _penalize_repetition(
        self, scores: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        vocabulary = scores.shape[-1]
        beyond = torch.arange(history.shape[1], device=history.device) >= lengths[:, None]
        ids = history.clamp(max=vocabulary).masked_fill(beyond, vocabulary)
        # (B, vocabulary + 1): ids that occurred; the last column takes what does not count
        occurred = torch.zeros(
            len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device
        ).scatter(1, ids, True)
        penalty = self.repetition_penalty[:, None]
        for t in range(scores.shape[1]):
            if t:  # the drafted token before this position
                newest = history.gather(1, (lengths + t - 1)[:, None]).clamp(max=vocabulary)
                occurred = occurred.scatter(1, newest, True)
            row = scores[:, t]
            penalized = torch.where(row < 0, row * penalty, row / penalty)
            scores[:, t] = torch.where(occurred[:, :-1], penalized, row)
        return scores

    def _suppress_stops(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = lengths[:, None] + torch.arange(scores.shape[1], device=scores.device)
        too_early = (places < self.min_length[:, None])[..., None]
        stops = self.stop_ids[:, None].expand(-1, scores.shape[1], -1)
        suppressed = scores.gather(2, stops).masked_fill(too_early, float("-inf"))
        return scores.scatter_(2, stops, suppressed)

    def _cut_tail(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply top-k, then top-p, with one sort; scores (B, vocabulary)."""
        vocabulary = scores.shape[-1]
        ordered, index = scores.sort(dim=-1)
        kth = (vocabulary - self.top_k).clamp(min=0, max=vocabulary - 1)[:, None]
        floor = ordered.gather(1, kth)
        floor = floor.masked_fill((self.top_k == 0)[:, None], float("-inf"))
        ordered = ordered.masked_fill(ordered < floor, float("-inf"))
        in_tail = ordered.softmax(-1).cumsum(-1) <= self.tail[:, None]
        # the most probable token always stays
        in_tail = in_tail & (torch.arange(vocabulary, device=scores.device) < vocabulary - 1)
        removed = torch.empty_like(in_tail).scatter(1, index, in_tail)
        return scores.masked_fill(removed | (scores < floor), float("-inf"))


def _padded(stop_ids: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """(B, n), at least one column."""
    width = max(1, *map(len, stop_ids))
    rows = []
    for ids in stop_ids:
        filler = ids[0] if ids else 0
        rows.append([*ids, *[filler] * (width - len(ids))])
    return rows
