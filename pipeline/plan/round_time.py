"""Predicted time and memory traffic of decoding rounds: a device profile applied to a wave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeline.plan.settings import WaveSummary
from std_core.cost_model.profile import CalibratedDraft, LatencyModel, Profile


class RoundCost(NamedTuple):
    """One round of a batch: time in seconds, and bytes read from device memory."""

    seconds: float
    bytes_read: float


@dataclass(frozen=True)
class RoundPredictor:
    """Predicts the rounds of a batch in which every row is the wave's mean request.

    Args:
        rows: rows in the batch.
        generated: tokens that each row has generated so far.
        sampled: whether tokens are sampled, which takes additional time for every token but those
            of prompt lookup (`ngram`), which has no distribution to sample from.
        min_verify_width: tokens per row that a verification is padded to (`--strict`).
    """

    profile: Profile
    wave: WaveSummary
    rows: int
    generated: float
    sampled: bool = False
    min_verify_width: int = 0

    def round(self, calibrated: CalibratedDraft | None) -> RoundCost:
        """γ draft steps and one verification of γ + 1 tokens; without a draft, one dense step."""
        if calibrated is None:
            return self._verification(gamma=0)
        gamma = calibrated.draft.gamma
        draft_step = self._draft_step(calibrated)
        verification = self._verification(gamma)
        return RoundCost(
            gamma * draft_step.seconds + verification.seconds,
            gamma * draft_step.bytes_read + verification.bytes_read,
        )

    def _verification(self, gamma: int) -> RoundCost:
        width = max(gamma + 1, self.min_verify_width)
        size = self.profile.model_size
        bytes_read = size.weights_read() + self._kv_entries_read() * size.kv_read()
        seconds = self._step_s(
            self.profile.latency, bytes_read, width=width, attended=self._kv_entries_attended()
        )
        return RoundCost(seconds + (gamma + 1) * self._sampling_s, bytes_read)

    def _draft_step(self, calibrated: CalibratedDraft) -> RoundCost:
        draft = calibrated.draft
        if draft.policy == "ngram":
            return RoundCost(self._step_s(calibrated.latency, 0.0, width=1, attended=0.0), 0.0)
        size = calibrated.second_model or self.profile.model_size
        weight_bytes = size.weights_read(
            None if calibrated.second_model else draft,
            self.rows,
            self.profile.union_fraction(draft, self.rows),
        )
        if draft.policy == "full" and not calibrated.second_model:  # its cache is the full model's
            entries_read = self._kv_entries_read()
            attended = self._kv_entries_attended()
        else:
            wanted = draft.k if draft.k is not None else draft.keep * self.wave.visual
            kept_visual = min(self.wave.visual, wanted)
            entries_read = self.rows * (kept_visual + self._text_entries)
            attended = entries_read
        bytes_read = weight_bytes + entries_read * size.kv_read(draft)
        seconds = self._step_s(calibrated.latency, bytes_read, width=1, attended=attended)
        return RoundCost(seconds + self._sampling_s, bytes_read)

    def _step_s(
        self, latency: LatencyModel, bytes_read: float, *, width: int, attended: float
    ) -> float:
        """Seconds of a step of `width` tokens per row, each of which attends to the same
        entries."""
        byte_s = bytes_read / self.profile.device.bandwidth
        return latency.seconds(byte_s, self.rows * width, attended * width)

    @property
    def _sampling_s(self) -> float:
        """Seconds that sampling adds to one token of every row."""
        return self.rows * self.profile.sampling_s_per_token if self.sampled else 0.0

    @property
    def _text_entries(self) -> float:
        """KV entries of one row that are not visual: its prompt's text and what it generated."""
        return self.wave.context - self.wave.visual + self.generated

    def _kv_entries_read(self) -> float:
        """KV entries that attention reads: a prefix that several rows share is read once. One row
        reads one prefix, however many questions on the video the wave has."""
        prefixes_per_row = max(self.wave.videos / self.wave.count, 1 / self.rows)
        return self.rows * (self.wave.visual * prefixes_per_row + self._text_entries)

    def _kv_entries_attended(self) -> float:
        """KV entries that attention multiplies: a shared prefix counts once per row."""
        return self.rows * (self.wave.context + self.generated)
