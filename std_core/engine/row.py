"""The host's record of a running row: what it has generated, when it ends, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from std_core.decoding.round import RowRound
from std_core.decoding.row_errors import isolated
from std_core.decoding.token_sampling import ResolvedSampling
from std_core.types import FinishReason, Request, RequestError, Result

Decode = Callable[[list[int]], str]
# The number of its tokens at which a row ends; None if it goes on.
EndCheck = Callable[["Row"], int | None]


@dataclass(frozen=True)
class DraftKV:
    """The entries that were selected for a row's draft, by place in the draft cache.

    Args:
        candidates: (m_v,) positions in the prefix from which entries were selected.
        start: place of the first selected entry in the row of the draft cache.
        count: selected entries per layer and KV head.
    """

    candidates: torch.Tensor
    start: int
    count: int


@dataclass
class Row:
    """A request in a slot. Made by its prefill, updated by each round.

    Args:
        sampling: the request's sampling parameters, resolved for this checkpoint and prompt.
        prefix: row of the prefix store; -1 for none.
        prompt_tokens: visual ones included.
        max_tokens: tokens that it may generate.
        accept_counts: [i]: rounds in which i drafted tokens were accepted.
        reject_counts: [i]: rounds among these in which at least one more token was proposed.
        draft_kv: None if nothing was selected for the draft.
        scores, logits: (vocabulary,) of each token, if its sampling keeps them.
    """

    request: Request
    sampling: ResolvedSampling
    prefix: int
    prompt_tokens: int
    visual_tokens: int
    max_tokens: int
    kv_keep: float
    weight_keep: float
    vision_s: float
    prefill_s: float
    accept_counts: list[int]
    reject_counts: list[int]
    draft_kv: DraftKV | None = None
    token_ids: list[int] = field(default_factory=list)
    drafted: int = 0
    proposed: int = 0
    decode_s: float = 0.0
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def record_round(self, done: RowRound, gamma: int, seconds: float) -> None:
        """Add a round's tokens and counts."""
        self.decode_s += seconds
        self.token_ids += done.tokens
        self.drafted += gamma
        self.proposed += done.proposed
        self.accept_counts[done.accepted] += 1
        self.reject_counts[done.accepted] += done.rejected

    def record_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add those of new tokens, (n, vocabulary) each."""
        self.scores += scores.unbind()
        self.logits += logits.unbind()

    def finished(
        self,
        stopped: bool,
        decode: Decode,
        end_check: EndCheck | None = None,
        error: RequestError | None = None,
    ) -> Result | None:
        """Return the row's result if it ends now, None if it goes on.

        Args:
            stopped: the newest token is a stop id.
            end_check: of the run; what it raises ends the run.
            error: ends the row.
        """
        end = None
        if error is None and end_check is not None:
            end = end_check(self)
        try:
            with isolated("decoding the text"):
                if error is not None:
                    return self.result("error", decode, error)
                reason = self.finish_reason(stopped, decode, end)
                return self.result(reason, decode) if reason else None
        except RequestError as undecodable:
            return self.result("error", lambda ids: "", error or undecodable)

    def finish_reason(
        self, stopped: bool, decode: Decode, end: int | None = None
    ) -> FinishReason | None:
        """Return why the row ends now, None if it goes on; cut its tokens behind its end.

        Args:
            stopped: the newest token is a stop id.
            end: number of tokens at which it ends, if the run's check has given one.
        """
        if end is not None:
            del self.token_ids[end:]
            return "stop"
        if self.request.sampling.stop:
            count = self._tokens_to_stop_text(decode)
            if count is not None:
                del self.token_ids[count:]
                return "stop"
        if stopped:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def _tokens_to_stop_text(self, decode: Decode) -> int | None:
        """Smallest number of tokens whose text contains a stop text; None if there is none."""
        if not self._has_stop_text(decode(self.token_ids)):
            return None
        first = max(1, self.request.sampling.min_tokens)
        for count in range(first, len(self.token_ids) + 1):
            if self._has_stop_text(decode(self.token_ids[:count])):
                return count
        return None

    def _has_stop_text(self, text: str) -> bool:
        return any(stop in text for stop in self.request.sampling.stop)

    def result(
        self, reason: FinishReason, decode: Decode, error: RequestError | None = None
    ) -> Result:
        """The row's result; its text ends before the first stop text."""
        text = decode(self.token_ids)
        if reason == "stop":
            found = [text.find(stop) for stop in self.request.sampling.stop]
            text = text[: min((at for at in found if at >= 0), default=len(text))]
        return Result(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            text=text,
            finish_reason=reason,
            num_prompt_tokens=self.prompt_tokens - self.visual_tokens,
            num_visual_tokens=self.visual_tokens,
            kv_keep=self.kv_keep,
            weight_keep=self.weight_keep,
            rounds=sum(self.accept_counts),
            drafted=self.drafted,
            proposed=self.proposed,
            accepted=sum(i * n for i, n in enumerate(self.accept_counts)),
            accept_counts=tuple(self.accept_counts),
            reject_counts=tuple(self.reject_counts),
            vision_s=self.vision_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            error=error,
            scores=tuple(self.scores[: len(self.token_ids)]),
            logits=tuple(self.logits[: len(self.token_ids)]),
        )
