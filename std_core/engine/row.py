"""The host's side of a slot: what a row has written, when it ends, and the result that it leaves
as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from std_core.decoding.token_sampling import ResolvedSampling
from std_core.types import FinishReason, Request, RequestError, Result


@dataclass
class Row:
    """A request in a slot. Filled at its prefill, moved on by rounds."""

    request: Request
    rule: ResolvedSampling
    prefix: int  # row of the prefix store, -1 for none
    prompt: int  # tokens, visual ones included
    visual: int
    limit: int  # tokens that it may write
    kv_keep: float
    weight_keep: float
    vision_s: float
    prefill_s: float
    accept_counts: list[int]  # [i]: rounds in which i drafted tokens were accepted
    reject_counts: list[int]  # [i]: of those the rounds in which one more was proposed
    view: DraftKV | None = None
    written: list[int] = field(default_factory=list)
    drafted: int = 0
    proposed: int = 0
    decode_s: float = 0.0

    def ends(self, stopped: bool, decode: Callable[[list[int]], str]) -> FinishReason | None:
        """Why a row ends here, if it does; cuts what was written at a stop text."""
        if self.request.sampling.stop and (count := self._stop_text(decode)) is not None:
            del self.written[count:]
            return "stop"
        if stopped:
            return "stop"
        return "length" if len(self.written) >= self.limit else None

    def _stop_text(self, decode: Callable[[list[int]], str]) -> int | None:
        """How many tokens it took until a stop text stood in the output."""
        stop = self.request.sampling.stop
        if not any(text in decode(self.written) for text in stop):
            return None
        counts = range(max(1, self.request.sampling.min_tokens), len(self.written) + 1)
        return next(
            (n for n in counts if any(text in decode(self.written[:n]) for text in stop)), None
        )

    def result(
        self,
        reason: FinishReason,
        decode: Callable[[list[int]], str],
        error: RequestError | None = None,
    ) -> Result:
        text = decode(self.written)
        ends = [at for stop in self.request.sampling.stop if (at := text.find(stop)) >= 0]
        return Result(
            request_id=self.request.request_id,
            token_ids=self.written,
            text=text[: min(ends)] if ends and reason == "stop" else text,
            finish_reason=reason,
            num_prompt_tokens=self.prompt - self.visual,
            num_visual_tokens=self.visual,
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
        )


@dataclass(frozen=True)
class DraftKV:
    """Where a draft's view of a row holds its chosen entries: `count` of them from place `at` on,
    taken from `places` of the row's prefix."""

    places: torch.Tensor  # (m_v,)
    at: int
    count: int

    @property
    def size(self) -> int:
        return len(self.places)
