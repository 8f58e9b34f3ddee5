"""What is known of one device running one model: step latencies, draft acceptance, text lengths.

The latency of a decode step is linear in its byte time (bytes read over the device's bandwidth)
with three more terms: a constant, one per token and one per attended KV entry (Crossover §4.3,
Appendix D). `jobs/calibrate.py` measures a profile; `device_specs.estimated_profile` makes one from
published figures where nothing was measured. `profile_json` reads and writes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from std_core.cost_model.acceptance import (
    AcceptanceCounts,
    AcceptanceCurve,
    KeepAgreement,
    agreement_log_odds,
    fit_acceptance_curve,
)
from std_core.cost_model.model_size import ModelSize
from std_core.types import Draft

PROFILE_VERSION = 4
# Kinds of prompts: their texts differ in length and in acceptance.
PROMPT_KINDS = ("caption", "question")
# Share of the dense loop's correct answers that a draft must reach before its text may be used
# without verification (`mode=sparse`).
MIN_RETRIEVAL = 0.9


@dataclass(frozen=True)
class Device:
    """A device's limits.

    Args:
        name: as the driver or the operating system reports it.
        kind: `cuda` or `cpu`.
        bandwidth: of its memory, bytes/s.
        memory: bytes.
        flops: of 16-bit matrix products, FLOP/s.
    """

    name: str
    kind: str
    bandwidth: float
    memory: float
    flops: float


# ---------------------------------------------------------------------------------------- latencies


class FitError(NamedTuple):
    """Quantiles of a fit's relative errors; zeros where nothing was fitted."""

    median: float = 0.0
    p90: float = 0.0


NOT_FITTED = FitError()


class NonNegativeFit(NamedTuple):
    """The coefficients of a table's columns, and the fit's errors."""

    coefficients: tuple[float, ...]
    error: FitError


@dataclass(frozen=True)
class TimedStep:
    """A measured decode step.

    Args:
        byte_s: bytes that the step reads over the bandwidth, seconds.
        tokens: of all rows.
        attended: KV entries attended, summed over all tokens of all rows.
        seconds: measured.
    """

    byte_s: float
    tokens: float
    attended: float
    seconds: float


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a decode step, linear in byte time, tokens and attended KV entries.

    Args:
        scale: of the byte time.
        constant: seconds per step.
        per_token: seconds per token.
        per_entry: seconds per attended KV entry.
        residual: of the fit.
    """

    scale: float = 1.0
    constant: float = 0.0
    per_token: float = 0.0
    per_entry: float = 0.0
    residual: FitError = NOT_FITTED

    def seconds(self, byte_s: float, tokens: float, attended: float) -> float:
        """Predict the latency of a step; arguments as in `TimedStep`."""
        return (
            self.scale * byte_s
            + self.constant
            + self.per_token * tokens
            + self.per_entry * attended
        )

    @classmethod
    def fit(cls, steps: Sequence[TimedStep]) -> LatencyModel:
        """Fit measured steps by non-negative least squares of relative errors."""
        table = [(step.byte_s, 1.0, step.tokens, step.attended) for step in steps]
        fit = fit_non_negative(table, [step.seconds for step in steps])
        scale, constant, per_token, per_entry = fit.coefficients
        return cls(scale, constant, per_token, per_entry, residual=fit.error)


class PrefillLatency(NamedTuple):
    """Seconds of a prompt's prefill: per prompt, per token, and per token squared."""

    constant: float
    per_token: float
    per_token_squared: float


class DraftSetupLatency(NamedTuple):
    """Seconds that a request takes before its first drafted token: KV selection, gather, and the
    second model's prefill.
    """

    constant: float = 0.0
    per_token: float = 0.0  # of the context

    def seconds(self, context: float) -> float:
        """Predict the latency for a context of so many tokens."""
        return self.constant + self.per_token * context


# ------------------------------------------------------------------------------------------- drafts


@dataclass(frozen=True)
class RetrievalScore:
    """A retrieval test (Crossover §5.1): questions about positions of a long context.

    Args:
        context: tokens.
        questions: how many were posed.
        dense_correct: of them, those that the dense loop answered correctly.
        draft_correct: of them, those that the draft alone answered correctly.
    """

    context: int
    questions: int
    dense_correct: int
    draft_correct: int

    @property
    def passes(self) -> bool:
        """Whether the draft may be used unverified.

        A dense loop that answers less than half of the questions is no evidence either way, so the
        test fails then.
        """
        conclusive = 2 * self.dense_correct >= self.questions
        return conclusive and self.draft_correct >= MIN_RETRIEVAL * self.dense_correct


@dataclass(frozen=True)
class CalibratedDraft:
    """A draft and its measurements. The planner chooses γ, so the draft's own is ignored.

    Args:
        latency: of one draft step.
        setup: once per request.
        acceptance: in rounds, by context, kind of prompt and sampling.
        keep_agreements: by keep and context. They move the acceptance to another keep than that of
            the rounds; empty if the keep is not to be chosen.
        rounds_keep: keep of the rounds; None: the draft's own.
        second_model: size of the second model, for a draft that has one.
        retrieval_scores: of the draft's unverified text, where that was tested.
    """

    draft: Draft
    latency: LatencyModel
    setup: DraftSetupLatency
    acceptance: tuple[AcceptanceCounts, ...]
    second_model: ModelSize | None = None
    retrieval_scores: tuple[RetrievalScore, ...] = ()
    keep_agreements: tuple[KeepAgreement, ...] = ()
    rounds_keep: float | None = None

    @property
    def keeps(self) -> tuple[float, ...]:
        """The shares of visual entries that the planner may choose from, ascending."""
        return tuple(sorted({one.keep for one in self.keep_agreements})) or (self.draft.keep,)

    def with_draft(self, draft: Draft) -> CalibratedDraft:
        """These measurements for a draft that differs in γ or in what it keeps only."""
        rounds_keep = self.draft.keep if self.rounds_keep is None else self.rounds_keep
        return replace(self, draft=draft, rounds_keep=rounds_keep)

    def acceptance_curve(self, context: float, kind: str, sampled: bool = False) -> AcceptanceCurve:
        """Estimate the acceptance at a context length and at the draft's keep.

        Rounds at one keep give the level, teacher-forced agreement gives the difference to another
        keep: the error of teacher forcing, which ignores that a round's tokens rest on drafted
        ones, is nearly the same at both.
        """
        curve = self._rounds_curve(context, kind, sampled)
        if not self.keep_agreements or self.rounds_keep is None or self.draft.k is not None:
            return curve
        weights = _context_weights([one.context for one in self.keep_agreements], context)
        odds = agreement_log_odds(self.keep_agreements, weights)
        return curve.shifted(odds.at(self.draft.keep) - odds.at(self.rounds_keep))

    def _rounds_curve(self, context: float, kind: str, sampled: bool) -> AcceptanceCurve:
        """Estimate the acceptance at a context length, at the keep of the rounds.

        Counts of the same sampling and kind of prompt are used; where there are none, the others.
        Counts of all contexts contribute, since a few texts alone are too noisy; their weight falls
        with the distance in octaves, to half at one octave.
        """
        same_sampling = [c for c in self.acceptance if c.sampled == sampled] or self.acceptance
        counts = [c for c in same_sampling if c.kind == kind] or same_sampling
        weights = _context_weights([c.context for c in counts], context)
        return fit_acceptance_curve(
            accepted=_weighted_sum((c.accepted for c in counts), weights),
            rejected=_weighted_sum((c.rejected for c in counts), weights),
        )


def _context_weights(contexts: Sequence[int], context: float) -> list[float]:
    """Weigh measurements by distance in octaves: half at one octave from the nearest's."""
    octaves = [abs(math.log2(max(1.0, context) / max(1, measured))) for measured in contexts]
    nearest = min(octaves)
    return [2.0 ** (nearest**2 - distance**2) for distance in octaves]


def _weighted_sum(counts: Iterable[Sequence[int]], weights: Sequence[float]) -> list[float]:
    """Sum sequences of counts by place; shorter ones count as zero beyond their end."""
    weighted = [
        [count * weight for count in by_place]
        for by_place, weight in zip(counts, weights, strict=True)
    ]
    return [sum(place) for place in itertools.zip_longest(*weighted, fillvalue=0.0)]


# ------------------------------------------------------------------------------------------ profile


class UnionFraction(NamedTuple):
    """u_B measured: the fraction of the projection weights that any of `rows` sequences activates.

    Args:
        channels: r_P, the share of input channels that each sequence keeps.
        rows: B.
        fraction: u_B.
    """

    channels: float
    rows: int
    fraction: float


class TextLength(NamedTuple):
    """Mean tokens of the text that a kind of prompt gets."""

    kind: str
    tokens: float


class PredictionSpread(NamedTuple):
    """Factors that bound a predicted time from below and above."""

    low: float = 1.0
    high: float = 1.0


EXACT = PredictionSpread()


@dataclass(frozen=True)
class Profile:
    """One device and one model.

    Args:
        model: the checkpoint's revision.
        dtype: of weights and KV cache.
        latency: of the full model's steps: dense ones (one token per row) and verifications.
        prefill: of a prompt.
        vision_s_per_token: seconds of the vision tower per visual token.
        drafts: those that the planner may choose from.
        union_fractions: as measured.
        text_lengths: as measured.
        spread: of predicted times.
        sampling_s_per_token: additional seconds of a sampled token over a greedy one.
        measured: whether on the device itself; else estimated from published figures.
    """

    device: Device
    model: str
    dtype: str
    model_size: ModelSize
    latency: LatencyModel
    prefill: PrefillLatency
    vision_s_per_token: float
    drafts: tuple[CalibratedDraft, ...] = ()
    union_fractions: tuple[UnionFraction, ...] = ()
    text_lengths: tuple[TextLength, ...] = ()
    spread: PredictionSpread = EXACT
    sampling_s_per_token: float = 0.0
    measured: bool = True
    version: int = PROFILE_VERSION

    def union_fraction(self, draft: Draft, rows: int) -> float | None:
        """Return u_B as measured for the nearest number of rows (in logarithm).

        None where it was not measured for the draft's share of channels, or the draft keeps all.
        """
        if draft.channels == 1:
            return None
        known = [u for u in self.union_fractions if u.channels == draft.channels]
        if not known:
            return None
        return min(known, key=lambda u: (abs(math.log(rows / u.rows)), u.fraction)).fraction

    def prefill_s(self, tokens: float) -> float:
        """Predict the seconds of a prompt's prefill, vision excluded."""
        latency = self.prefill
        return latency.constant + latency.per_token * tokens + latency.per_token_squared * tokens**2


# ---------------------------------------------------------------------------------------------- fit


def fit_non_negative(table: Sequence[Sequence[float]], values: Sequence[float]) -> NonNegativeFit:
    """Fit the coefficients ≥ 0 of a table's columns by least squares of relative errors.

    Every subset of the columns is tried, so there should be few columns.

    Args:
        table: rows of samples.
        values: one per row, above 0.
    """
    target = np.asarray(values, float)
    samples = np.asarray(table, float) / target[:, None]
    column_scale = np.abs(samples).max(0)
    column_scale = np.where(column_scale > 0, column_scale, 1)
    samples = samples / column_scale
    columns = samples.shape[1]
    best = np.zeros(columns)
    least_error = float(len(target))
    for count in range(1, columns + 1):
        for subset in map(list, itertools.combinations(range(columns), count)):
            solution = np.linalg.lstsq(samples[:, subset], np.ones(len(target)), rcond=None)[0]
            error = float(np.square(samples[:, subset] @ solution - 1).sum())
            if (solution >= 0).all() and error < least_error - 1e-12:
                least_error = error
                best = np.zeros(columns)
                best[subset] = solution
    errors = np.abs(samples @ best - 1)
    return NonNegativeFit(
        coefficients=tuple(map(float, best / column_scale)),
        error=FitError(float(np.median(errors)), float(np.quantile(errors, 0.9))),
    )
