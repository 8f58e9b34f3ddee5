"""Decode loops timed against one another: on the same rows, prompts and caches, segment by segment
in turn, from states that are taken back. What the suites `decode` and `schedule` measure with."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from std_core.decoding.round import Drafted, Slots, decode_round, draft, prompt_lookup, verify
from std_core.engine.batch import Batch
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, Request

STATE = ("length", "draft_length", "position", "total", "generated", "remaining")
RESAMPLES = 2000
Written = list[list[int]]  # tokens of each row


@dataclass
class Clock:
    """What a loop's segments took, in seconds."""

    per_token: list[float] = field(
        default_factory=list
    )  # a segment's time over the tokens of a row
    draft: list[float] = field(default_factory=list)  # each draft step
    verify: list[float] = field(
        default_factory=list
    )  # the rest of each round: verification, acceptance, commit
    kept: list[int] = field(default_factory=list)  # tokens of each round and row


class Pair:
    """Seated rows that decode densely and with a draft in turn, from the same state each time."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        prepare: Callable[[Request], ModelInputs],
        policy: Draft,
    ):
        self.policy = policy
        self.batch = Batch(engine, policy, prepare)
        self.prefill_s = self.batch.prefill_slots(requests)
        self.slots = self.batch.slots
        self.model = engine.model
        self.first = _state(self.slots)
        step = partial(draft, engine.drafter(policy))
        self.propose = prompt_lookup if policy.policy == "ngram" else step
        self.dense = Clock()
        self.drafted = Clock()
        self.written: Written = [[] for _ in requests]
        self.diverged: set[int] = set()

    def once(self, tokens: int) -> None:
        """One pair of segments, the dense one first; the rows then stand where the draft's has
        brought them."""
        begin = _state(self.slots)
        plain = self._dense(tokens, self.dense)
        _put_back(self.slots, begin)
        written = self._segment(tokens, self.propose, self.policy.gamma, self.drafted)
        for row, (one, other) in enumerate(zip(written, plain, strict=True)):
            self.written[row] += one
            if any(a != b for a, b in zip(one, other, strict=False)):
                self.diverged.add(row)

    def from_the_start(self, strict: int, tokens: int) -> Written:
        """What the dense loop writes with every step padded to `strict` tokens, from the first
        state on."""
        _put_back(self.slots, self.first)
        self.slots.strict = strict
        written = self._dense(tokens, Clock())
        self.slots.strict = 0
        return written

    def verification(self, width: int, times: int = 5) -> float:
        """Median seconds of a verification of so many tokens, which leaves nothing behind."""
        self.slots.reserve(width)
        tokens = self.slots.last.expand(-1, width - 1)
        return statistics.median(
            _timed(lambda: verify(self.model, self.slots, tokens)) for _ in range(times)
        )

    def _dense(self, tokens: int, clock: Clock) -> Written:
        # a dense step does not feed the draft's cache
        view = self.slots.view
        self.slots.view = "target"
        written = self._segment(tokens, partial(draft, self.model), 0, clock)
        self.slots.view = view
        return written

    def _segment(
        self, tokens: int, propose: Callable[[Slots, int], Drafted], gamma: int, clock: Clock
    ) -> Written:
        """Rounds until a row has `tokens` tokens more on average, or one may not go on."""
        written: Written = [[] for _ in self.written]
        ends = [0.0]

        def timed(slots: Slots, gamma: int) -> Drafted:
            began = time.perf_counter()
            drafted = propose(slots, gamma)
            ends[0] = time.perf_counter()
            if gamma:
                clock.draft.append((ends[0] - began) / gamma)
            return drafted

        began = time.perf_counter()
        while sum(map(len, written)) < tokens * len(written) and bool(
            (self.slots.remaining > 0).all()
        ):
            done = decode_round(self.model, self.slots, timed, gamma)
            for row, new, kept in zip(
                written, done.tokens.tolist(), done.kept.tolist(), strict=True
            ):
                row += new[:kept]
                clock.kept.append(kept)
            clock.verify.append(time.perf_counter() - ends[0])
        clock.per_token.append(
            (time.perf_counter() - began) * len(written) / max(1, sum(map(len, written)))
        )
        return written


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Median of the pairs' ratios, and its 95% lower bound (bootstrap over pairs)."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return statistics.median(ratios), medians[RESAMPLES // 20]


def read_bandwidth(gigabytes: float = 2.0, times: int = 9) -> float:
    """GB/s of read-only sums over a working set that no cache holds; the best of `times`."""
    memory = torch.ones(int(gigabytes * 1e9) // 4)
    return gigabytes / min(_timed(memory.sum) for _ in range(times))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _state(slots: Slots) -> dict[str, torch.Tensor]:
    return {name: getattr(slots, name).clone() for name in STATE}


def _put_back(slots: Slots, state: dict[str, torch.Tensor]) -> None:
    """Entries and tokens behind the lengths are written over by what comes next."""
    for name, value in state.items():
        getattr(slots, name).copy_(value)
