"""Figures of a report by bucket (class of context lengths) and draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.report.data import ReportData


@dataclass(frozen=True)
class BucketStats:
    """Sums over the rows of one draft in one bucket.

    Attributes:
        max_context: Upper bound of the bucket in tokens, a power of two.
        draft: Name of the draft; `dense` for decoding without one.
        rows: Number of rows.
        tokens: Generated tokens.
        rounds: Rounds of drafting and verification.
        proposed: Drafted tokens.
        accepted: Accepted drafted tokens.
        acceptance_error: Standard error of `acceptance` between rows.
        phase_seconds: Phase → seconds in the engine.
    """

    max_context: int
    draft: str
    rows: int
    tokens: float
    rounds: float
    proposed: float
    accepted: float
    acceptance_error: float
    phase_seconds: dict[str, float]

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per forward pass of the full model: the accepted ones and the pass's own.

        An upper bound of the speed-up over dense decoding.
        """
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding."""
        decode_seconds = self.phase_seconds["decode"]
        return self.tokens / decode_seconds if decode_seconds else 0.0

    @property
    def engine_seconds(self) -> float:
        return sum(self.phase_seconds.values())


@dataclass(frozen=True)
class Speedup:
    """Decoding speed with a draft over dense decoding, in one bucket.

    Attributes:
        max_context: The bucket.
        measured: Ratio of the tokens per second.
        bound: Ratio if drafting were free.
    """

    max_context: int
    measured: float
    bound: float


def bucket_stats(data: ReportData) -> list[BucketStats]:
    """Statistics of the rows with a text, by bucket and draft, shortest contexts first."""
    context = np.maximum(data.context_tokens, 1)
    max_context = 2 ** np.ceil(np.log2(context)).astype(np.int64)
    keys = zip(
        max_context[data.has_text].tolist(), data.drafts[data.has_text].tolist(), strict=True
    )
    stats = []
    for bucket, draft in sorted(set(keys)):
        members = data.has_text & (max_context == bucket) & (data.drafts == draft)
        stats.append(_stats(data, members, max_context=bucket, draft=draft))
    return stats


def _stats(data: ReportData, members: np.ndarray, max_context: int, draft: str) -> BucketStats:
    proposed = data.numbers("proposed")[members]
    accepted = data.numbers("accepted")[members]
    return BucketStats(
        max_context=max_context,
        draft=draft,
        rows=int(members.sum()),
        tokens=float(data.numbers("num_generated_tokens")[members].sum()),
        rounds=float(data.numbers("rounds")[members].sum()),
        proposed=float(proposed.sum()),
        accepted=float(accepted.sum()),
        acceptance_error=_ratio_error(accepted, proposed),
        phase_seconds={
            phase: float(seconds[members].sum()) for phase, seconds in data.phase_seconds.items()
        },
    )


def _ratio_error(numerators: np.ndarray, denominators: np.ndarray) -> float:
    """Standard error of sum(numerators) / sum(denominators); 0 if it cannot be estimated.

    The ratio estimator's standard error for independent rows.

    Args:
        numerators: (rows,).
        denominators: (rows,).
    """
    count = len(denominators)
    total = denominators.sum()
    if count < 2 or not total:
        return 0.0
    residuals = numerators - numerators.sum() / total * denominators
    return float(np.sqrt(count / (count - 1) * (residuals**2).sum()) / total)


def speedups(stats: list[BucketStats]) -> list[Speedup]:
    """Speed-ups of the buckets that were decoded both with a draft and densely."""
    dense_speed = {s.max_context: s.tokens_per_second for s in stats if s.draft == "dense"}
    found = []
    for drafted in stats:
        reference = dense_speed.get(drafted.max_context)
        if drafted.proposed and reference:
            speedup = Speedup(
                max_context=drafted.max_context,
                measured=drafted.tokens_per_second / reference,
                bound=drafted.tokens_per_pass,
            )
            found.append(speedup)
    return found
