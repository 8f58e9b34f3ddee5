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

    def shifted(self, log_odds: float) -> AcceptanceCurve:
        """Add `log_odds` to the log odds of all places."""
        factor = math.exp(log_odds)
        return AcceptanceCurve(tuple(p * factor / (p * factor + 1 - p) for p in self.by_place))

    def rescaled(self, first: float) -> AcceptanceCurve:
        """Set the probability at place 0 to `first` and scale the odds of all places alike."""
        return self.shifted(log_odds(first) - log_odds(self.by_place[0]))


def log_odds(probability: float) -> float:
    """Return log(p / (1 − p)) of a probability that is neither 0 nor 1."""
    return math.log(probability / (1 - probability))


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


@dataclass(frozen=True)
class KeepAgreement:
    """How often a draft that keeps a share of the visual entries agrees with the full model.

    Measured along texts of the full model: the draft reads a whole text in one pass, and predicts
    each of its tokens from the true ones before it (teacher forcing).

    Args:
        keep: share of the visual entries kept per layer and KV head.
        context: tokens of the prompts, mean.
        agreed: tokens that the draft predicts as the full model wrote them.
        tokens: all predicted tokens.
    """

    keep: float
    context: int
    agreed: int
    tokens: int


def agreement_log_odds(agreements: Sequence[KeepAgreement], weights: Sequence[float]) -> LogOddsFit:
    """Estimate the log odds of agreement at each measured keep, which never fall as keep grows.

    Neighbours that fall are pooled (isotonic regression). A prior of one token, half of it agreed,
    keeps the odds finite.

    Args:
        weights: of each agreement's counts.
    """
    pools: list[_Pool] = []
    for keep in sorted({one.keep for one in agreements}):
        measured = [
            (one, weight)
            for one, weight in zip(agreements, weights, strict=True)
            if one.keep == keep
        ]
        pools.append(
            _Pool(
                (keep,),
                agreed=sum(weight * one.agreed for one, weight in measured),
                tokens=sum(weight * one.tokens for one, weight in measured),
            )
        )
        while len(pools) > 1 and pools[-2].rate > pools[-1].rate:
            last = pools.pop()
            pools[-1] = pools[-1].merged(last)
    return LogOddsFit(tuple((keep, log_odds(pool.rate)) for pool in pools for keep in pool.keeps))


@dataclass(frozen=True)
class _Pool:
    """Neighbouring keeps with one rate."""

    keeps: tuple[float, ...]
    agreed: float
    tokens: float

    @property
    def rate(self) -> float:
        return (self.agreed + 0.5) / (self.tokens + 1)

    def merged(self, other: _Pool) -> _Pool:
        return _Pool(
            self.keeps + other.keeps,
            agreed=self.agreed + other.agreed,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True)
class LogOddsFit:
    """Log odds of agreement by keep, ascending; linear in log(keep) between them."""

    by_keep: tuple[tuple[float, float], ...]

    def at(self, keep: float) -> float:
        """Return the log odds at a keep; beyond the measured ones, those of the nearest."""
        lowest, odds = self.by_keep[0]
        if keep <= lowest:
            return odds
        for upper, upper_odds in self.by_keep[1:]:
            if keep <= upper:
                share = math.log(keep / lowest) / math.log(upper / lowest)
                return odds + share * (upper_odds - odds)
            lowest = upper
            odds = upper_odds
        return odds


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
