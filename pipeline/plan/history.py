"""What the finished waves of a run have shown: acceptance, speed and lengths, as medians over
waves. Immutable values; reads no clock."""

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

WAVES_KEPT = 32  # the newest, of each kind of evidence

T = TypeVar("T")
Key = tuple[object, ...]
Values = Mapping[Key, tuple[float, ...]]


def prompt_kind(prompt: str) -> str:
    """`question` or `caption`: a prompt that ends with a question mark gets a short answer."""
    return "question" if prompt.rstrip().endswith("?") else "caption"


def without_gamma(draft: Draft | None) -> Draft | None:
    """A draft with γ = 1, as a key: acceptance per token does not depend on γ."""
    return None if draft is None else replace(draft, gamma=1)


@dataclass(frozen=True)
class History:
    """Evidence from a run's waves. `with_issued` and `with_results` return the next history.

    Attributes:
        waves: waves handed out so far.
        acceptance_curves: by draft and kind of prompt, one curve per wave.
        time_ratios: by draft, measured over predicted seconds of rounds, one per wave.
        mean_lengths: by kind of prompt, mean generated tokens, one per wave.
    """

    waves: int = 0
    acceptance_curves: Mapping[Key, tuple[AcceptanceCurve, ...]] = field(default_factory=dict)
    time_ratios: Values = field(default_factory=dict)
    mean_lengths: Values = field(default_factory=dict)

    def with_issued(self, waves: int) -> History:
        """The history after so many more waves were handed out."""
        return replace(self, waves=self.waves + waves)

    def with_results(self, wave: Wave, results: Sequence[Result]) -> History:
        """The history after a wave, or a part of it, has finished; failed requests are ignored."""
        kinds = {
            request.request_id: prompt_kind(request.input_row.prompt) for request in wave.requests
        }
        finished = [r for r in results if r.error is None and r.request_id in kinds]
        history = self
        for kind in sorted({kinds[result.request_id] for result in finished}):
            of_kind = [result for result in finished if kinds[result.request_id] == kind]
            history = history._with_length(kind, of_kind)
            if wave.draft is not None:
                history = history._with_acceptance(wave.draft, kind, of_kind)
        return history._with_time_ratio(wave, finished)

    def acceptance(self, draft: Draft, kind: str) -> AcceptanceCurve | None:
        """A draft's acceptance, the median over waves at each position; None if no wave has shown
        it for such prompts."""
        curves = self.acceptance_curves.get((without_gamma(draft), kind))
        if not curves:
            return None
        positions = range(max(len(curve.by_place) for curve in curves))
        return AcceptanceCurve(
            tuple(statistics.median(curve.at(i) for curve in curves) for i in positions)
        )

    def drafts_seen(self, kind: str) -> list[Draft]:
        """The drafts, with γ = 1, whose acceptance on a kind of prompt was seen."""
        return [
            draft
            for draft, of_kind in self.acceptance_curves
            if of_kind == kind and isinstance(draft, Draft)
        ]

    def has_tried(self, draft: Draft) -> bool:
        """Whether a wave of this run has shown how long rounds with a draft take."""
        return (without_gamma(draft),) in self.time_ratios

    def length(self, kind: str) -> float | None:
        """Generated tokens for a kind of prompt; None if no wave has shown it."""
        return _median(self.mean_lengths, (kind,))

    def time_ratio(self, draft: Draft | None) -> float:
        """Factor that corrects a predicted time: from waves with this draft, else from all waves,
        else 1."""
        own = _median(self.time_ratios, (without_gamma(draft),))
        if own:
            return own
        all_ratios = [ratio for ratios in self.time_ratios.values() for ratio in ratios]
        return statistics.median(all_ratios) if all_ratios else 1.0

    def _with_length(self, kind: str, results: Sequence[Result]) -> History:
        mean = statistics.fmean(len(result.token_ids) for result in results)
        return replace(self, mean_lengths=_appended(self.mean_lengths, (kind,), mean))

    def _with_acceptance(self, draft: Draft, kind: str, results: Sequence[Result]) -> History:
        """Dense rounds of a wave that drafts carry no acceptance statistics, so drafted tokens are
        counted too."""
        if min(_rounds(results), _verified_tokens(results)) < MIN_DRAFTED_ROUNDS:
            return self
        curve = fit_acceptance_curve(*count_accepted_rejected(results))
        key = (without_gamma(draft), kind)
        return replace(self, acceptance_curves=_appended(self.acceptance_curves, key, curve))

    def _with_time_ratio(self, wave: Wave, results: Sequence[Result]) -> History:
        predicted = sum(_predicted_decode_s(result, wave) for result in results)
        measured = sum(result.decode_s for result in results)
        if _rounds(results) < MIN_DRAFTED_ROUNDS or predicted <= 0 or measured <= 0:
            return self
        key = (without_gamma(wave.draft),)
        return replace(self, time_ratios=_appended(self.time_ratios, key, measured / predicted))


def _rounds(results: Sequence[Result]) -> int:
    return sum(result.rounds for result in results)


def _verified_tokens(results: Sequence[Result]) -> int:
    """Drafted tokens that were accepted, and those whose rejection ended a round."""
    return sum(result.accepted + sum(result.reject_counts) for result in results)


def _predicted_decode_s(result: Result, wave: Wave) -> float:
    """Predicted seconds of a row's rounds. γ may differ from round to round; time grows linearly
    with it."""
    if not wave.options:
        return 0.0
    option = wave.options[0]
    gamma = wave.draft.gamma if wave.draft else 0
    extra_tokens = result.drafted - result.rounds * gamma
    return result.rounds * option.row_round_s + extra_tokens * option.row_draft_token_s


def _appended(values: Mapping[Key, tuple[T, ...]], key: Key, value: T) -> dict[Key, tuple[T, ...]]:
    return {**values, key: (*values.get(key, ()), value)[-WAVES_KEPT:]}


def _median(values: Values, key: Key) -> float | None:
    return statistics.median(values[key]) if key in values else None
