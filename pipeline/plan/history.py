"""What earlier waves of a run have shown: acceptance, speed and lengths, as medians over waves.
Values, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipeline.records import Wave
from std_core.cost_model.acceptance import (
    AcceptanceCurve,
    count_accepted_rejected,
    fit_acceptance_curve,
)
from std_core.types import MIN_DRAFTED_ROUNDS, Draft, Result

KEPT = 32  # waves whose figures are kept, the newest
EVERY = 50  # waves of which one explores

T = TypeVar("T")
Key = tuple[object, ...]
Seen = Mapping[Key, tuple[float, ...]]


def kind_of(prompt: str) -> str:
    """Prompts that ask are answered briefly; the others want a description."""
    return "question" if prompt.rstrip().endswith("?") else "caption"


def draft_key(draft: Draft | None) -> Draft | None:
    """A draft as acceptance per token depends on it: whatever its γ."""
    return None if draft is None else replace(draft, gamma=1)


@dataclass(frozen=True)
class History:
    """`issued` and `observed` return the next one.

    Attributes:
        waves: handed out so far.
        accepts: by draft and kind of prompt, the chances of each wave.
        speeds: by draft, measured seconds of rounds over predicted ones.
        lengths: by kind of prompt, mean tokens written.
    """

    waves: int = 0
    accepts: Mapping[Key, tuple[AcceptanceCurve, ...]] = field(default_factory=dict)
    speeds: Seen = field(default_factory=dict)
    lengths: Seen = field(default_factory=dict)

    def issued(self, waves: int) -> History:
        """Once so many waves are handed out."""
        return replace(self, waves=self.waves + waves)

    def observed(self, wave: Wave, results: Sequence[Result]) -> History:
        """Once a wave, or a part of it, is through."""
        kinds = {request.request_id: kind_of(request.input_row.prompt) for request in wave.requests}
        good = [r for r in results if r.error is None and r.request_id in kinds]
        accepts = self.accepts
        speeds = self.speeds
        lengths = self.lengths
        for kind in sorted({kinds[r.request_id] for r in good}):
            some = [r for r in good if kinds[r.request_id] == kind]
            lengths = _with(lengths, (kind,), statistics.fmean(len(r.token_ids) for r in some))
            # dense rounds of a wave that drafts judge nothing
            if wave.draft is not None and min(_rounds(some), _judged(some)) >= MIN_DRAFTED_ROUNDS:
                accepts = _with(
                    accepts,
                    (draft_key(wave.draft), kind),
                    fit_acceptance_curve(*count_accepted_rejected(some)),
                )
        expected = sum(_foretold(r, wave) for r in good)
        spent = sum(r.decode_s for r in good)
        if _rounds(good) >= MIN_DRAFTED_ROUNDS and expected > 0 and spent > 0:
            speeds = _with(speeds, (draft_key(wave.draft),), spent / expected)
        return replace(self, accepts=accepts, speeds=speeds, lengths=lengths)

    def chances(self, draft: Draft, kind: str) -> AcceptanceCurve | None:
        """Of a draft, median by median; None if it has not been seen on such prompts."""
        seen = self.accepts.get((draft_key(draft), kind))
        if not seen:
            return None
        places = max(len(one.by_place) for one in seen)
        return AcceptanceCurve(
            tuple(statistics.median(one.at(place) for one in seen) for place in range(places))
        )

    def length(self, kind: str) -> float | None:
        """Tokens that such prompts' texts have; None if none has been seen."""
        return _median(self.lengths, (kind,))

    def speed(self, draft: Draft | None) -> float:
        """By what a predicted time is to be multiplied: as seen with this draft, else with any."""
        own = _median(self.speeds, (draft_key(draft),))
        every = [ratio for ratios in self.speeds.values() for ratio in ratios]
        return own or (statistics.median(every) if every else 1.0)

    def explores(self, turn: int) -> bool:
        """Whether a wave takes a draft that would have been dropped."""
        return turn % EVERY == EVERY - 1

    def exploration(self, turn: int) -> int:
        """Which of them: each in turn."""
        return turn // EVERY


def _rounds(results: Sequence[Result]) -> int:
    return sum(r.rounds for r in results)


def _judged(results: Sequence[Result]) -> int:
    """Drafted tokens that were accepted, and those that ended a round."""
    return sum(r.accepted + sum(r.reject_counts) for r in results)


def _foretold(result: Result, wave: Wave) -> float:
    """Seconds that a row's rounds were expected to take, whatever γ each of them had: they grow
    evenly with it."""
    if not wave.options:
        return 0.0
    way = wave.options[0]
    gamma = wave.draft.gamma if wave.draft else 0
    return (
        result.rounds * way.row_round_s
        + (result.drafted - result.rounds * gamma) * way.row_draft_token_s
    )


def _with(seen: Mapping[Key, tuple[T, ...]], key: Key, value: T) -> dict[Key, tuple[T, ...]]:
    return {**seen, key: (*seen.get(key, ()), value)[-KEPT:]}


def _median(seen: Seen, key: Key) -> float | None:
    return statistics.median(seen[key]) if key in seen else None
