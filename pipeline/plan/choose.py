"""Chooses how a wave is decoded: with which draft, which γ, in how many slots.

Predictions come from a device profile and from what earlier waves have shown. Pure: there is no
queue, no engine and no clock here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pipeline.plan.capacity import Capacity
from pipeline.plan.history import History, without_gamma
from pipeline.plan.round_time import RoundPredictor
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption
from std_core.cost_model.acceptance import AcceptanceCounts, AcceptanceCurve, log_odds
from std_core.cost_model.profile import CalibratedDraft, DraftSetupLatency, Profile
from std_core.types import Draft, GammaSchedule

MIN_SPEEDUP = 1.05  # predicted; below it a draft is not worth its uncertainty
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10)
ACCEPTANCE_CLASSES = 20  # of the first drafted token's acceptance, that a γ schedule distinguishes
NO_DRAFT = AcceptanceCurve((0.0,))
UNCALIBRATED = AcceptanceCounts(2048, "caption", (80,), (20,))  # assumed without a calibration
DEFAULT_LENGTHS = {"caption": 128.0, "question": 32.0}  # generated tokens where nothing is known
EXPLORATION_INTERVAL = 50  # waves, of which one takes a rejected draft
# a wave tries a draft of which nothing was measured if so many waves like it remain
TRIAL_INTERVAL = 10


class ExpectedRounds(NamedTuple):
    """Rounds that a wave's texts take, summed over its requests.

    Args:
        dense_rounds: the same without a draft: one token per round.
        acceptance: a, mean over the requests.
    """

    rounds: float
    dense_rounds: float
    acceptance: float


@dataclass(frozen=True)
class DraftPlanner:
    """Predicts and ranks the ways to decode a wave on one device, at one moment of a run."""

    profile: Profile
    history: History
    config: WaveConfig

    def options(
        self, wave: WaveSummary, wave_index: int, remaining: int = 0
    ) -> tuple[DraftOption, ...]:
        """All ways to decode a wave, the chosen one first; empty if not a single slot fits.

        Args:
            wave_index: number of the wave in the run. Every `EXPLORATION_INTERVAL`-th wave takes a
                rejected draft, so that a wrong prediction is corrected by a measurement.
            remaining: requests that wait behind this wave. Where nothing was measured, the waves
                after the first try one draft each, as long as much work remains.
        """
        dense = self.predict(None, wave)
        if self.config.draft is None:
            return () if dense is None else (dense,)
        if self.config.draft == "auto":
            return self._ranked_options(dense, wave, wave_index, remaining)
        fixed = self.predict(self._calibration(self.config.draft), wave)
        if fixed is None:
            return ()
        options = [fixed] if dense is None else [fixed, dense]
        return tuple(_with_speedups(options, dense))

    def _ranked_options(
        self, dense: DraftOption | None, wave: WaveSummary, wave_index: int, remaining: int
    ) -> tuple[DraftOption, ...]:
        options = [] if dense is None else [dense]
        options += filter(None, (self._best_variant(draft, wave) for draft in self.profile.drafts))
        ranked = sorted(
            _with_speedups(options, dense), key=lambda option: option.seconds_per_request
        )
        chosen = next(filter(self._is_acceptable, ranked), None)
        rejected = [o for o in ranked if o is not chosen and o.draft is not None]
        explored = self._explored(rejected, wave, wave_index, remaining)
        explores = explored is not None
        chosen = explored or chosen
        if chosen is None:
            return tuple(ranked)
        others = [option for option in ranked if option is not chosen]
        if chosen.draft is not None:
            chosen = self._with_gamma_schedule(chosen, wave, allow_dense=not explores)
        return (chosen, *others)

    def _is_acceptable(self, option: DraftOption) -> bool:
        """Whether an option may be chosen: dense decoding, or a draft that is known to pay."""
        if option.draft is None:
            return True
        is_known = self._predictions_hold or self.history.has_tried(option.draft)
        return is_known and option.speedup >= MIN_SPEEDUP

    @property
    def _predictions_hold(self) -> bool:
        """Whether times are measured ones, or those of a GPU, whose published figures are
        reached."""
        return self.profile.measured or self.profile.device.kind == "cuda"

    def _explored(
        self, rejected: Sequence[DraftOption], wave: WaveSummary, wave_index: int, remaining: int
    ) -> DraftOption | None:
        """The rejected draft that a wave takes to learn from it; None for most waves."""
        if not rejected:
            return None
        if wave_index % EXPLORATION_INTERVAL == EXPLORATION_INTERVAL - 1:
            return rejected[wave_index // EXPLORATION_INTERVAL % len(rejected)]
        trial = wave_index - 1  # the first wave decodes densely, as a reference
        if self._predictions_hold or not 0 <= trial < len(self.profile.drafts):
            return None
        if remaining < TRIAL_INTERVAL * wave.count:
            return None
        family = _family(self.profile.drafts[trial].draft)
        return next((o for o in rejected if o.draft and _family(o.draft) == family), None)

    # --- prediction ------------------------------------------------------------------------------

    def predict(self, calibrated: CalibratedDraft | None, wave: WaveSummary) -> DraftOption | None:
        """What to expect of a draft, or of dense decoding; None if not a single slot fits."""
        draft = None if calibrated is None else calibrated.draft
        slots = self.capacity.slots(wave.longest, draft)
        if not slots:
            return None
        expected = self._expected_rounds(calibrated, wave)
        predictor = self._predictor(wave, rows=min(slots, wave.count))
        round_ = predictor.round(calibrated)
        dense_step = predictor.round(None)
        row_round_s = round_.seconds / predictor.rows
        decode_s = expected.rounds / wave.count * row_round_s * self.history.time_ratio(draft)
        round_bytes = expected.rounds * round_.bytes_read
        setup_s = 0.0 if calibrated is None else calibrated.setup.seconds(wave.context)
        row_draft_token_s = 0.0
        if draft is not None:
            draft_s = round_.seconds - dense_step.seconds
            row_draft_token_s = draft_s / draft.gamma / predictor.rows
        return DraftOption(
            draft,
            slots,
            acceptance=expected.acceptance,
            bytes_per_token=round_bytes / expected.dense_rounds / predictor.rows,
            speedup_bound=expected.dense_rounds * dense_step.bytes_read / round_bytes,
            seconds_per_request=decode_s + setup_s,
            row_round_s=row_round_s,
            row_draft_token_s=row_draft_token_s,
            memory=tuple(self.capacity.memory_breakdown(wave.longest, draft, slots).items()),
        )

    def _expected_rounds(
        self, calibrated: CalibratedDraft | None, wave: WaveSummary
    ) -> ExpectedRounds:
        gamma = 0 if calibrated is None else calibrated.draft.gamma
        curves = self._acceptance_by_kind(calibrated, wave)
        rounds = 0.0
        dense_rounds = 0.0
        acceptance = 0.0
        for kind, count in wave.kinds:
            tokens = self.expected_length(kind) - 1  # the first token comes with the prefill
            rounds += count * curves[kind].rounds(tokens, gamma)
            dense_rounds += count * NO_DRAFT.rounds(tokens, 0)
            acceptance += count * curves[kind].rate(gamma)
        return ExpectedRounds(rounds, dense_rounds, acceptance / wave.count)

    def expected_length(self, kind: str) -> float:
        """Tokens generated for a kind of prompt: as seen in this run, else as calibrated, else a
        default; at most `max_tokens`."""
        expected = (
            self.history.length(kind)
            or dict(self.profile.text_lengths).get(kind)
            or DEFAULT_LENGTHS[kind]
        )
        return min(expected, float(self.config.max_tokens))

    @cached_property
    def capacity(self) -> Capacity:
        return Capacity(self.profile, self.config)

    def _predictor(self, wave: WaveSummary, rows: int) -> RoundPredictor:
        """Rounds of a batch whose rows have generated half of their text."""
        generated = sum(count * self.expected_length(kind) for kind, count in wave.kinds)
        return RoundPredictor(
            self.profile,
            wave,
            rows=rows,
            generated=generated / wave.count / 2,
            sampled=self.config.sampled,
            min_verify_width=self.config.strict,
        )

    # --- acceptance ------------------------------------------------------------------------------

    def _calibration(self, draft: Draft) -> CalibratedDraft:
        """The calibration of a draft or, failing that, of one that differs in what it keeps only.
        An uncalibrated draft is assumed to take as long as the full model."""
        similar = [c for c in self.profile.drafts if _family(c.draft) == _family(draft)]
        exact = [c for c in similar if without_gamma(c.draft) == without_gamma(draft)]
        if matches := exact or similar:
            return matches[0].with_draft(draft)
        return CalibratedDraft(draft, self.profile.latency, DraftSetupLatency(), (UNCALIBRATED,))

    def _acceptance_by_kind(
        self, calibrated: CalibratedDraft | None, wave: WaveSummary
    ) -> dict[str, AcceptanceCurve]:
        """For each kind of prompt in a wave: as seen in this run, else as calibrated."""
        if calibrated is None:
            return {kind: NO_DRAFT for kind, _ in wave.kinds}
        return {
            kind: self.history.acceptance(calibrated.draft, kind)
            or self._calibrated_acceptance(calibrated, wave.context, kind)
            for kind, _ in wave.kinds
        }

    def _calibrated_acceptance(
        self, calibrated: CalibratedDraft, context: float, kind: str
    ) -> AcceptanceCurve:
        """As calibrated, moved by what this run has shown of the draft at other keeps."""
        curve = calibrated.acceptance_curve(context, kind, self.config.sampled)
        family = _family(calibrated.draft)
        shifts = []
        for draft in self.history.drafts_seen(kind):
            seen = self.history.acceptance(draft, kind)
            if seen is None or _family(draft) != family:
                continue
            expected = calibrated.with_draft(draft)
            expected_curve = expected.acceptance_curve(context, kind, self.config.sampled)
            shifts.append(log_odds(seen.at(0)) - log_odds(expected_curve.at(0)))
        return curve.shifted(statistics.fmean(shifts)) if shifts else curve

    def _mean_acceptance(self, calibrated: CalibratedDraft, wave: WaveSummary) -> AcceptanceCurve:
        """Mean over a wave's requests."""
        curves = self._acceptance_by_kind(calibrated, wave)
        positions = range(max(len(curve.by_place) for curve in curves.values()))
        return AcceptanceCurve(
            tuple(
                sum(curves[kind].at(position) * count for kind, count in wave.kinds) / wave.count
                for position in positions
            )
        )

    # --- keep and γ ------------------------------------------------------------------------------

    def _best_variant(self, calibrated: CalibratedDraft, wave: WaveSummary) -> DraftOption | None:
        """A draft with the keep and γ of the least predicted time; None if it fits with none."""
        predictions = (
            self.predict(variant, wave)
            for kept in _with_each_keep(calibrated)
            for variant in self._with_each_gamma(kept)
        )
        fitting = [option for option in predictions if option is not None]
        return min(fitting, key=lambda option: option.seconds_per_request, default=None)

    def _with_each_gamma(self, calibrated: CalibratedDraft) -> list[CalibratedDraft]:
        """A draft with every γ; with `--strict`, a verification has to hold γ + 1 tokens."""
        limit = self.config.strict
        return [
            calibrated.with_draft(replace(calibrated.draft, gamma=gamma))
            for gamma in GAMMAS
            if not limit or gamma < limit
        ]

    def _with_gamma_schedule(
        self, option: DraftOption, wave: WaveSummary, allow_dense: bool
    ) -> DraftOption:
        """An option whose γ is free in each round, and the memory that the largest γ needs."""
        option = replace(option, gamma_schedule=self._gamma_schedule(option, wave, allow_dense))
        needed = self.capacity.memory_breakdown(wave.longest, option.widest_draft, option.slots)
        return replace(option, memory=tuple(needed.items()))

    def _gamma_schedule(
        self, option: DraftOption, wave: WaveSummary, allow_dense: bool
    ) -> GammaSchedule:
        """The fastest γ for each number of rows and each acceptance class.

        Args:
            allow_dense: whether γ = 0, a dense step, is a choice. It never is with a second model,
                since a dense step does not extend that model's cache.
        """
        assert option.draft is not None
        calibrated = self._calibration(option.draft)
        drafts: list[CalibratedDraft | None] = []
        if allow_dense and not option.draft.model:
            drafts.append(None)
        for each in self._with_each_gamma(calibrated):
            if self.capacity.slots(wave.longest, each.draft) >= option.slots:
                drafts.append(each)
        mean = self._mean_acceptance(calibrated, wave)
        tokens_per_class = [
            _tokens_by_gamma(mean.rescaled((index + 0.5) / ACCEPTANCE_CLASSES))
            for index in range(ACCEPTANCE_CLASSES)
        ]
        gammas = [
            _fastest_gammas(self._seconds_by_gamma(drafts, wave, rows), tokens_per_class)
            for rows in range(1, option.slots + 1)
        ]
        return GammaSchedule(tuple(gammas), mean.at(0))

    def _seconds_by_gamma(
        self, drafts: Sequence[CalibratedDraft | None], wave: WaveSummary, rows: int
    ) -> dict[int, float]:
        """γ → seconds of a round of so many rows."""
        predictor = self._predictor(wave, rows)
        found: dict[int, float] = {}
        for calibrated in drafts:
            draft = None if calibrated is None else calibrated.draft
            gamma = 0 if draft is None else draft.gamma
            found[gamma] = predictor.round(calibrated).seconds * self.history.time_ratio(draft)
        return found


def _with_speedups(options: Sequence[DraftOption], dense: DraftOption | None) -> list[DraftOption]:
    """Speedups over dense decoding or, where that does not fit, over the slowest option."""
    if not options:
        return []
    baseline = dense or max(options, key=lambda option: option.seconds_per_request)
    return [
        replace(option, speedup=baseline.seconds_per_request / option.seconds_per_request)
        for option in options
    ]


def _family(draft: Draft) -> Draft:
    """What drafts that take about equally long and are accepted about equally often share."""
    return replace(draft, gamma=1, keep=1.0, k=None)


def _with_each_keep(calibrated: CalibratedDraft) -> list[CalibratedDraft]:
    """A draft with every keep that was calibrated; as it is where a number of entries is given."""
    if calibrated.draft.k is not None:
        return [calibrated]
    return [
        calibrated.with_draft(replace(calibrated.draft, keep=keep)) for keep in calibrated.keeps
    ]


def _tokens_by_gamma(curve: AcceptanceCurve) -> dict[int, float]:
    """γ → expected tokens of a round; 0 is a dense step."""
    return {gamma: curve.tokens(gamma) for gamma in (0, *GAMMAS)}


def _fastest_gammas(
    seconds: Mapping[int, float], tokens_per_class: Sequence[Mapping[int, float]]
) -> tuple[int, ...]:
    """For each acceptance class, the γ with the least time per token."""
    return tuple(
        min(seconds, key=lambda gamma: seconds[gamma] / tokens[gamma])
        for tokens in tokens_per_class
    )
