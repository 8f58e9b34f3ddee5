"""The dense loop and a drafted loop timed against each other: on the same rows and caches, segment
by segment in turn, each pair of segments from the same state.

Used by the suite `decode` and by calibration."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from jobs.suites.shared.timing import Stopwatch, wall_seconds
from std_core.decoding.round import Drafted, decode_round, draft, prompt_lookup, verify
from std_core.decoding.slots import Slots
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, Request

# tensors of `Slots` that say how far each row is; entries behind them are overwritten
STATE = ("length", "draft_length", "position", "total", "generated", "remaining")
Tokens = list[list[int]]  # of each row


@dataclass
class LoopTimes:
    """Times of a loop's segments, in seconds, and the tokens of its rounds."""

    per_token: list[float] = field(default_factory=list)  # of a row, one value per segment
    draft: list[float] = field(default_factory=list)  # one value per draft step
    # verification, acceptance and commit, one value per round
    verify: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # tokens per round and row

    @property
    def draft_s(self) -> float:
        """Median of a draft step; 0 if there was none."""
        return statistics.median(self.draft or [0.0])

    @property
    def verify_s(self) -> float:
        """Median of a round without its draft steps; of the dense loop, of a step."""
        return statistics.median(self.verify or [0.0])


class PairedLoops:
    """Rows in an engine's slots that decode densely and with a draft in turn."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        prepare: Callable[[Request], ModelInputs],
        policy: Draft,
    ):
        self.policy = policy
        self.batch = engine.new_batch(policy, prepare)
        self.prefill_s = self.batch.prefill_slots(requests)
        self.slots = self.batch.slots
        self.model = engine.model
        self.first_state = _save_state(self.slots)
        model_draft = partial(draft, engine.draft_models.get(policy))
        self.drafting = prompt_lookup if policy.policy == "ngram" else model_draft
        self.dense = LoopTimes()
        self.drafted = LoopTimes()
        self.written: Tokens = [[] for _ in requests]
        self.diverged: set[int] = set()  # rows whose drafted tokens differed from the dense ones

    def run_segments(self, tokens: int) -> None:
        """Run one dense segment of `tokens` tokens per row and then, from the same state, a drafted
        one; the rows go on from the drafted one's end."""
        start = _save_state(self.slots)
        dense_tokens = self._run_dense(tokens, self.dense)
        _restore_state(self.slots, start)
        drafted_tokens = self._run_segment(tokens, self.drafting, self.policy.gamma, self.drafted)
        for row, (drafted, dense) in enumerate(zip(drafted_tokens, dense_tokens, strict=True)):
            self.written[row] += drafted
            if any(a != b for a, b in zip(drafted, dense, strict=False)):
                self.diverged.add(row)

    def replay_dense(self, width: int, tokens: int) -> Tokens:
        """Tokens of the dense loop from the first state on, every step padded to `width` tokens."""
        _restore_state(self.slots, self.first_state)
        self.slots.strict = width
        written = self._run_dense(tokens, LoopTimes())
        self.slots.strict = 0
        return written

    def verification_seconds(self, width: int, times: int = 5) -> float:
        """Median seconds of a verification of `width` tokens per row; no row advances."""
        self.slots.reserve(width)
        tokens = self.slots.last.expand(-1, width - 1)
        return statistics.median(
            wall_seconds(lambda: verify(self.model, self.slots, tokens)) for _ in range(times)
        )

    def _run_dense(self, tokens: int, times: LoopTimes) -> Tokens:
        # a dense step does not write to the draft's cache
        view = self.slots.view
        self.slots.view = "target"
        written = self._run_segment(tokens, partial(draft, self.model), 0, times)
        self.slots.view = view
        return written

    def _run_segment(
        self, tokens: int, drafting: Callable[[Slots, int], Drafted], gamma: int, times: LoopTimes
    ) -> Tokens:
        """Run rounds until rows have `tokens` more tokens on average, or one reaches its limit."""
        written: Tokens = [[] for _ in self.written]
        verify_watch = Stopwatch()

        def timed_drafting(slots: Slots, gamma: int) -> Drafted:
            draft_watch = Stopwatch()
            drafted = drafting(slots, gamma)
            if gamma:
                times.draft.append(draft_watch.seconds / gamma)
            verify_watch.reset()
            return drafted

        segment_watch = Stopwatch()
        while _count(written) < tokens * len(written) and bool((self.slots.remaining > 0).all()):
            done = decode_round(self.model, self.slots, timed_drafting, gamma)
            for row, new, kept in zip(
                written, done.tokens.tolist(), done.kept.tolist(), strict=True
            ):
                row += new[:kept]
                times.kept.append(kept)
            times.verify.append(verify_watch.seconds)
        per_token = segment_watch.seconds * len(written) / max(1, _count(written))
        times.per_token.append(per_token)
        return written


def _count(tokens: Tokens) -> int:
    return sum(map(len, tokens))


def _save_state(slots: Slots) -> dict[str, torch.Tensor]:
    return {name: getattr(slots, name).clone() for name in STATE}


def _restore_state(slots: Slots, state: dict[str, torch.Tensor]) -> None:
    """Move rows back; the next rounds overwrite entries and tokens behind the restored lengths."""
    for name, value in state.items():
        getattr(slots, name).copy_(value)
