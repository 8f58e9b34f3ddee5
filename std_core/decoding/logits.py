"""The processors of logits that requests can ask for, for all rows at once and with lengths on the
device: what rounds bend logits with. Bit for bit what `sampling.process_logits` has from transformers' own,
row by row."""

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


@dataclass(frozen=True)
class LogitsProcessors:
    """Of each row (B,), with the value that changes nothing where it asks for nothing."""

    penalty: torch.Tensor  # 1
    least: torch.Tensor  # tokens of prompt and output before which it may not stop; 0
    temperature: torch.Tensor  # 1
    top_k: torch.Tensor  # 0
    tail: torch.Tensor  # 1 - top_p, the mass that is cut off; -1
    stop_ids: torch.Tensor  # (B, n) padded with the row's first, or with 0 in rows without
    penalises: bool  # whether any row does
    holds: bool
    heats: bool
    cuts: bool

    @classmethod
    def of(
        cls, samplings: Sequence[ResolvedSampling | None], vocabulary: int, device: torch.device
    ) -> LogitsProcessors | None:
        """None where a row has a processor that is not known here."""
        rows = [_row(rule.processors if rule is not None else [], vocabulary) for rule in samplings]
        if not all(rows):
            return None
        penalty, least, temperature, top_k, tail, stops = zip(
            *(row for row in rows if row), strict=True
        )
        most = max(1, *map(len, stops))
        numbers = [
            torch.tensor(x, dtype=torch.float32, device=device)
            for x in (penalty, temperature, tail)
        ]
        counts = [torch.tensor(x, device=device) for x in (least, top_k)]
        padded = torch.tensor(
            [[*ids, *[ids[0] if ids else 0] * (most - len(ids))] for ids in stops], device=device
        )
        return cls(
            numbers[0],
            counts[0],
            numbers[1],
            counts[1],
            numbers[2],
            padded,
            any(p != 1 for p in penalty),
            any(least),
            any(t != 1 for t in temperature),
            any(top_k) or any(t >= 0 for t in tail),
        )

    def apply(
        self, logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """As `sampling.process_logits`, and like it at times in place: logits (B, T, vocabulary); history (B,
        capacity), of which `lengths` (B,) lie before the first position."""
        scores = logits.float()
        if self.penalises:
            scores = self._penalised(scores, history, lengths)
        if self.holds:
            places = lengths[:, None] + torch.arange(scores.shape[1], device=scores.device)
            early = (places < self.least[:, None])[..., None]
            stops = self.stop_ids[:, None].expand(-1, scores.shape[1], -1)
            scores.scatter_(2, stops, scores.gather(2, stops).masked_fill(early, float("-inf")))
        if self.heats:
            scores = scores.div_(self.temperature[:, None, None])
        for t in (
            range(scores.shape[1]) if self.cuts else ()
        ):  # one by one: an order takes seven times a score's bytes
            scores[:, t : t + 1] = self._cut(scores[:, t : t + 1])
        return scores

    def _penalised(
        self, scores: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        vocabulary = scores.shape[-1]
        behind = torch.arange(history.shape[1], device=history.device) >= lengths[:, None]
        seen = _marked(history.clamp(max=vocabulary).masked_fill(behind, vocabulary), vocabulary)
        penalty = self.penalty[:, None]
        for t in range(scores.shape[1]):
            if t:  # the draft's token before it
                newest = history.gather(1, (lengths + t - 1)[:, None]).clamp(max=vocabulary)
                seen = seen.scatter(1, newest, True)
            row = scores[:, t]
            scores[:, t] = torch.where(
                seen[:, :-1], torch.where(row < 0, row * penalty, row / penalty), row
            )
        return scores

    def _cut(self, scores: torch.Tensor) -> torch.Tensor:
        """Top-k, then top-p, off one order."""
        vocabulary = scores.shape[-1]
        ordered, index = scores.sort(dim=-1)
        kth = (
            (vocabulary - self.top_k)
            .clamp(min=0, max=vocabulary - 1)[:, None, None]
            .expand(-1, scores.shape[1], 1)
        )
        floor = ordered.gather(2, kth).masked_fill((self.top_k == 0)[:, None, None], float("-inf"))
        ordered = ordered.masked_fill(ordered < floor, float("-inf"))
        low = ordered.softmax(-1).cumsum(-1) <= self.tail[:, None, None]
        low = low & (torch.arange(vocabulary, device=scores.device) < vocabulary - 1)  # one stays
        return scores.masked_fill(
            torch.empty_like(low).scatter(2, index, low) | (scores < floor), float("-inf")
        )


def _marked(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(B, vocabulary + 1) which ids (B, n) there are."""
    nothing = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return nothing.scatter(1, ids, True)


def _row(
    processors: Sequence[LogitsProcessor], vocabulary: int
) -> tuple[float, int, float, int, float, list[int]] | None:
    """One row's numbers, in the order of the fields of `LogitsProcessors`."""
    penalty = 1.0
    least = 0
    temperature = 1.0
    top_k = 0
    tail = -1.0
    stops: list[int] = []
    for asked in processors:
        if (
            isinstance(asked, RepetitionPenaltyLogitsProcessor)
            and asked.prompt_ignore_length is None
        ):
            penalty = asked.penalty
        elif isinstance(asked, MinNewTokensLengthLogitsProcessor):
            least = asked.prompt_length_to_skip + asked.min_new_tokens
            stops = asked.eos_token_id.tolist()
        elif isinstance(asked, TemperatureLogitsWarper):
            temperature = asked.temperature
        elif isinstance(asked, TopKLogitsWarper):
            top_k = min(asked.top_k, vocabulary)
        elif isinstance(asked, TopPLogitsWarper) and asked.min_tokens_to_keep == 1:
            tail = 1 - asked.top_p
        else:
            return None
    return penalty, least, temperature, top_k, tail, stops
