"""The models that draft: the target model with fewer weights, or a second, smaller model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from std_core.model import sparsity
from std_core.model.checkpoint import Checkpoint
from std_core.model.drafters import build_drafter, pair_drafter, step_weight_bytes
from std_core.model.model import Model
from std_core.types import Draft


@dataclass
class DraftModels:
    """Draft models of one target model, built at first use and kept.

    Args:
        target: the model that verifies.
        checkpoint: its checkpoint, against which a second model is checked.
        thresholds: of activation sparsity (TEAL), per projection, by the share of channels kept.
        models: the draft models built so far, by the fields of `Draft` that change weights.
    """

    target: Model
    checkpoint: Checkpoint
    thresholds: dict[float, dict[str, float]] = field(default_factory=dict)
    models: dict[tuple[Any, ...], Model] = field(default_factory=dict)

    def get(self, draft: Draft) -> Model:
        """Return the model that computes a draft's logits.

        It is the target itself if the draft reads all weights.

        Raises:
            ValueError: the second model cannot be loaded, or has another tokenizer.
        """
        key = (draft.depth, draft.channels, draft.weights, draft.model)
        if key not in self.models:
            base = self._load_second_model(draft.model) if draft.model else self.target
            self.models[key] = build_drafter(base, draft, self.thresholds.get(draft.channels, {}))
        return self.models[key]

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
