"""Acceptance of drafted tokens: counts, and the probabilities estimated from them.

A drafted token's position in its round is called its place, from 0 on. The verification rejects a
draft from its first wrong token on, so the probabilities are conditional: the token at place i is
accepted with probability a_i, given that all tokens before it were accepted. The acceptance of a
model's draft hardly depends on the place. That of a prompt lookup does: a match is either wrong at
once or right for long.

Symbols: γ drafted tokens per round; a the per-token acceptance (Sparse-to-Dense §3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from std_core.types import Result


@dataclass(frozen=True)
class AcceptanceCurve:
    """The conditional acceptance probability at each place of a round.

    The last entry holds for all later places.
    """

    by_place: tuple[float, ...]

    def at(self, place: int) -> float:
        """Return the probability at a place, from 0 on."""
        return self.by_place[min(place, len(self.by_place) - 1)]

    def tokens(self, gamma: int) -> float:
        """Return the expected tokens of a round, including the full model's own.

        With one a for all places this is (1 − a^(γ+1)) / (1 − a).
        """
        return sum(self._survival(gamma))

    def rounds(self, tokens: float, gamma: int) -> float:
        """Return the expected rounds of γ until `tokens` tokens are written; at least one.

        A text usually ends inside a round, so the tokens of its last round beyond the end are
        wasted. Their expected number is that of a renewal process far from its start.
        """
        survival = self._survival(gamma)
        per_round = sum(survival)
        wasted = sum(place * probability for place, probability in enumerate(survival)) / per_round
        return max(1.0, (tokens + wasted) / per_round)

    def rate(self, gamma: int) -> float:
        """Return a of rounds of γ: accepted tokens over tokens that were accepted or rejected."""
        accepted = self.tokens(gamma) - 1
        rejected = 1 - math.prod(map(self.at, range(gamma)))
        return accepted / (accepted + rejected) if accepted + rejected else 0.0

    def _survival(self, gamma: int) -> list[float]:
        """Return the probabilities that a round writes more than 0, 1, … γ tokens."""
        return [math.prod(map(self.at, range(place))) for place in range(gamma + 1)]

    def rescaled(self, first: float) -> AcceptanceCurve:
        """Set the probability at place 0 to `first` and scale the odds of all places alike."""
        odds = first / (1 - first) * (1 - self.by_place[0]) / self.by_place[0]
        return AcceptanceCurve(tuple(p * odds / (p * odds + 1 - p) for p in self.by_place))


@dataclass(frozen=True)
class AcceptanceCounts:
    """Measured acceptance of one draft at one context length and kind of prompt.

    Args:
        context: tokens of the prompts, mean.
        kind: of the prompts, one of `profile.PROMPT_KINDS`.
        accepted: by place, how often the token was accepted.
        rejected: by place, how often it was rejected with all tokens before it accepted.
        sampled: whether tokens were sampled at temperature 1 instead of chosen greedily.
    """

    context: int
    kind: str
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]
    sampled: bool = False


def fit_acceptance_curve(accepted: Sequence[float], rejected: Sequence[float]) -> AcceptanceCurve:
    """Estimate the probabilities from counts by place; never 0 or 1.

    The estimate at each place has a prior that weighs one token: the place before it, or 0.5 at
    place 0.
    """
    probabilities: list[float] = []
    prior = 0.5
    for yes, no in zip(accepted, rejected, strict=True):
        prior = (yes + prior) / (yes + no + 1)
        probabilities.append(prior)
    return AcceptanceCurve(tuple(probabilities) or (0.5,))


def count_accepted_rejected(results: Sequence[Result]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count accepted and rejected drafted tokens by place, as `fit_acceptance_curve` takes them.

    A row's end may cut its last round; the tokens cut off there are not counted as rejected.
    """
    places = range(max((len(r.accept_counts) for r in results), default=1) - 1)
    accepted = [sum(sum(r.accept_counts[place + 1 :]) for r in results) for place in places]
    rejected = [sum(sum(r.reject_counts[place : place + 1]) for r in results) for place in places]
    observed = max((place + 1 for place in places if accepted[place] + rejected[place]), default=0)
    return tuple(accepted[:observed]), tuple(rejected[:observed])
