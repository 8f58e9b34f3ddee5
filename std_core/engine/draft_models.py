"""The models that draft: the target model with fewer weights, or a second, smaller model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from std_core.model import sparsity
from std_core.model.checkpoint import Checkpoint
from std_core.model.drafters import build_drafter, pair_drafter, step_weight_bytes
from std_core.model.model import Model
from std_core.types import Draft, Weights


class _Key(NamedTuple):
    """The fields of `Draft` that decide which model drafts."""

    depth: float
    channels: float
    weights: Weights
    model: str


class DraftModels:
    """Draft models of one target model, built at first use and kept.

    `thresholds` are those of activation sparsity (TEAL): per projection, by the share of channels
    kept.

    Args:
        target: the model that verifies.
        checkpoint: its checkpoint, against which a second model is checked.
    """

    def __init__(self, target: Model, checkpoint: Checkpoint):
        self.target = target
        self.checkpoint = checkpoint
        self.thresholds: dict[float, dict[str, float]] = {}
        self._models: dict[_Key, Model] = {}

    def get(self, draft: Draft) -> Model:
        """Return the model that computes a draft's logits.

        It is the target itself if the draft reads all weights.

        Raises:
            ValueError: the second model cannot be loaded, or has another tokenizer.
        """
        key = _key(draft)
        if key not in self._models:
            base = self._load_second_model(draft.model) if draft.model else self.target
            self._models[key] = build_drafter(base, draft, self.thresholds.get(draft.channels, {}))
        return self._models[key]

    def put(self, draft: Draft, model: Model) -> None:
        """Use a model that the caller has loaded."""
        self._models[_key(draft)] = model

    def _load_second_model(self, path: str) -> Model:
        checkpoint = Checkpoint.load(path)
        checkpoint.check_can_draft_for(self.checkpoint)
        model = Model.load(checkpoint, self.target.dtype, str(self.target.device))
        return pair_drafter(self.target, model)

    def weight_keep(self, draft: Draft | None) -> float:
        """Bytes of weights that a draft step reads, divided by those of a dense step."""
        if draft is None:
            return 1.0
        if draft.policy == "ngram":
            return 0.0
        return step_weight_bytes(self.get(draft)) / step_weight_bytes(self.target)

    def needs_calibration(self, draft: Draft | None) -> bool:
        """Whether a draft uses activation sparsity whose thresholds are not set yet."""
        return draft is not None and draft.channels < 1 and draft.channels not in self.thresholds

    def calibrate(self, draft: Draft, activations: dict[str, torch.Tensor]) -> None:
        """Set the thresholds of a draft's share of channels.

        Args:
            activations: recorded inputs of the projections, (rows, in) by the projection's name.
        """
        self.thresholds[draft.channels] = sparsity.calibrate_thresholds(
            self.target.decoder, activations, draft.channels
        )


def _key(draft: Draft) -> _Key:
    return _Key(draft.depth, draft.channels, draft.weights, draft.model)
