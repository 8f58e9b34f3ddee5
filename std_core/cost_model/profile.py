"""What a device and a model do together, in few numbers: byte times, a cost per branch beyond them,
acceptance.

A step's time is its bytes over the device's bandwidth and a kernel cost (Crossover §4.3, Appendix
D): constant, by the token, and by the entry that a token looks at. Measured by `jobs/calibrate.py`;
where nothing was measured, from what is published of a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from std_core.cost_model.account import AcceptanceCurve, ModelSize, chances
from std_core.types import Draft

VERSION = 3
RETRIEVES = (
    0.9  # of what the dense loop finds, that a draft has to find whose text nothing verifies
)
KINDS = (
    "caption",
    "question",
)  # of prompts, as texts differ in length and in how well they can be foretold


@dataclass(frozen=True)
class Device:
    """`name` as its driver or the system has it; bytes/s, bytes, FLOP/s of 16-bit matrix
    products."""

    name: str
    kind: str  # cuda or cpu
    bandwidth: float
    memory: float
    flops: float


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `scale` × byte time + `constant` + `token` × tokens + `entry` × entries
    that they look at.

    `residual`: median and 90th percentile of the fit's relative errors; zeros where nothing was
    fitted."""

    scale: float = 1.0
    constant: float = 0.0
    token: float = 0.0
    entry: float = 0.0
    residual: tuple[float, float] = (0.0, 0.0)

    def seconds(self, byte_s: float, tokens: float, seen: float) -> float:
        """
        Args:
            byte_s: bytes that the step reads over the bandwidth.
            tokens: of all rows.
            seen: entries of all rows, each counted once per token of its row.
        """
        return self.scale * byte_s + self.constant + self.token * tokens + self.entry * seen

    @classmethod
    def fit(cls, steps: Sequence[Step]) -> Cost:
        """Non-negative least squares of relative errors."""
        table = [(step.byte_s, 1.0, step.tokens, step.seen) for step in steps]
        weights, errors = non_negative(table, [step.seconds for step in steps])
        scale, constant, token, entry = weights
        return cls(scale, constant, token, entry, errors)


@dataclass(frozen=True)
class Step:
    """A step that was timed: what `Cost.seconds` is asked, and its answer."""

    byte_s: float
    tokens: float
    seen: float
    seconds: float


@dataclass(frozen=True)
class Accepted:
    """Drafted tokens at a context and kind of prompt, by their place in a round: how often they
    were accepted, and how often refused where all before them were accepted. `drawn`: of texts that
    are drawn at temperature 1, not greedy."""

    context: int
    kind: str
    accepted: tuple[int, ...]
    refused: tuple[int, ...]
    drawn: bool = False


@dataclass(frozen=True)
class Retrieved:
    """Questions on places of a context, and how many the dense loop and a draft alone answered
    rightly."""

    context: int
    asked: int
    dense: int
    sparse: int

    @property
    def enough(self) -> bool:
        """Whether the draft finds nearly all that the model finds, and the model finds enough to
        tell."""
        return 2 * self.dense >= self.asked and self.sparse >= RETRIEVES * self.dense


@dataclass(frozen=True)
class CalibratedDraft:
    """A draft as it was calibrated; its γ is left to the scheduler.

    Args: once: seconds of selection, gather and a second model's prefill, per request and per token
        of its context. pair: the second model's account, if there is one. retrieved: by the draft
        alone, where it was asked to.
    """

    draft: Draft
    cost: Cost
    once: tuple[float, float]
    acceptance: tuple[Accepted, ...]
    pair: ModelSize | None = None
    retrieved: tuple[Retrieved, ...] = ()

    def accepts(self, context: float, kind: str, drawn: bool = False) -> AcceptanceCurve:
        """Of what was measured in this way of choosing tokens and of this kind of prompt, if any
        was: all contexts, the nearer ones more, since a few texts tell less than acceptance changes
        between two of them."""
        alike = [a for a in self.acceptance if a.drawn == drawn] or self.acceptance
        same = [a for a in alike if a.kind == kind] or alike
        away = [abs(math.log2(max(1.0, context) / max(1, a.context))) for a in same]
        nearer = [2.0 ** (min(away) ** 2 - octaves**2) for octaves in away]  # halved an octave away
        return chances(
            *(_weighed([getattr(a, of) for a in same], nearer) for of in ("accepted", "refused"))
        )


@dataclass(frozen=True)
class Profile:
    """One device and one model.

    Args:
        model: its revision.
        full: of the full model's steps, dense (one token a row) and verifications.
        prefill: seconds of a prompt, of each token, of each token squared.
        vision: seconds of a visual token.
        noise: seconds that a token takes longer which is drawn, not greedy.
        drafts: that may be chosen; without any there is nothing to choose.
        union: (kept share of the channels, rows, u_B), as measured.
        lengths: (kind of prompt, tokens written), as measured.
        spread: factors of a predicted time that bound it.
        measured: whether on the device itself.
    """

    device: Device
    model: str
    dtype: str
    account: ModelSize
    full: Cost
    prefill: tuple[float, float, float]
    vision: float
    drafts: tuple[CalibratedDraft, ...] = ()
    union: tuple[tuple[float, int, float], ...] = ()
    lengths: tuple[tuple[str, float], ...] = ()
    spread: tuple[float, float] = (1.0, 1.0)
    noise: float = 0.0
    measured: bool = True
    version: int = VERSION

    def union_of(self, draft: Draft, rows: int) -> float | None:
        """u_B of the nearest batch that was measured; None where none was, or the draft uses all
        channels."""
        known = [
            (abs(math.log(rows / b)), u)
            for channels, b, u in self.union
            if channels == draft.channels
        ]
        return min(known)[1] if known and draft.channels < 1 else None

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prompt."""
        once, each, squared = self.prefill
        return once + each * tokens + squared * tokens**2


def _weighed(counts: Sequence[Sequence[int]], weights: Sequence[float]) -> list[float]:
    """Their sum, place by place."""
    each = ([count * weight for count in row] for row, weight in zip(counts, weights, strict=True))
    return [sum(place) for place in itertools.zip_longest(*each, fillvalue=0.0)]


def non_negative(
    table: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """The weights ≥ 0 of a table's columns that come nearest to the values, by the sum of squared
    relative errors; and those errors' median and 90th percentile. Columns are few: every subset is
    tried."""
    goal = np.asarray(values, float)
    rows = np.asarray(table, float) / goal[:, None]
    size = np.abs(rows).max(0)
    rows = rows / np.where(size > 0, size, 1)
    best = np.zeros(rows.shape[1])
    least = float(len(goal))
    for count in range(1, rows.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(rows.shape[1]), count)):
            found = np.linalg.lstsq(rows[:, subset], np.ones(len(goal)), rcond=None)[0]
            error = float(np.square(rows[:, subset] @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best = np.zeros(rows.shape[1])
                least = error
                best[subset] = found
    errors = np.abs(rows @ best - 1)
    weights = best / np.where(size > 0, size, 1)
    return tuple(map(float, weights)), (float(np.median(errors)), float(np.quantile(errors, 0.9)))


# --------------------------------------------------------------------------------------------- JSON


def to_json(profile: Profile) -> dict[str, Any]:
    return asdict(profile)


def from_json(content: Any) -> Profile:
    """Raises ValueError, in one clause, where this is no profile or one of another version."""
    if not isinstance(content, dict) or "version" not in content or "device" not in content:
        raise ValueError("is no device profile")
    if content["version"] != VERSION:
        raise ValueError(f"is of version {content['version']}, version {VERSION} is needed")
    try:
        account = _account(content["account"])
        assert account is not None
        return replace(
            Profile(**_known(Profile, content)),
            device=Device(**content["device"]),
            account=account,
            full=_cost(content["full"]),
            prefill=tuple(content["prefill"]),
            drafts=tuple(map(_tried, content["drafts"])),
            union=tuple(map(tuple, content["union"])),
            lengths=tuple(map(tuple, content["lengths"])),
            spread=tuple(content["spread"]),
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"is no device profile: {error}") from error


def _known(cls: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: content[f.name] for f in fields(cls)}


def _account(content: Mapping[str, Any] | None) -> ModelSize | None:
    return None if content is None else ModelSize(**content)


def _cost(content: Mapping[str, Any]) -> Cost:
    return Cost(**{**content, "residual": tuple(content["residual"])})


def _tried(content: Mapping[str, Any]) -> CalibratedDraft:
    accepted = tuple(
        Accepted(**{**a, "accepted": tuple(a["accepted"]), "refused": tuple(a["refused"])})
        for a in content["acceptance"]
    )
    pair = _account(content["pair"])
    retrieved = tuple(Retrieved(**r) for r in content["retrieved"])
    return CalibratedDraft(
        Draft(**content["draft"]),
        cost=_cost(content["cost"]),
        once=tuple(content["once"]),
        acceptance=accepted,
        pair=pair,
        retrieved=retrieved,
    )
