"""A check by running one token: how a model calls its attention may not be in its configuration."""

from __future__ import annotations

from typing import Any

import torch

from std_core.model.families import sliding_window_of


class UnsupportedCall(Exception):
    """A model calls attention in a way that cannot be answered; the text is a predicate."""


class AttentionTrace:
    """Replaces a KV cache for one token, and records how the model calls attention.

    With a single token, attention returns the token's own value, so no cache is needed.
    """

    def __init__(self, text: Any, layers: int):
        """
        Args:
            text: the text stack's configuration.
            layers: expected to call attention once each, in order.
        """
        self.text = text
        self.expected_layers = list(range(layers))
        self.kv_shapes: set[tuple[int, int]] = set()  # KV heads and head size
        self.called_layers: list[int] = []
        self.problems: set[str] = set()

    def record(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        """Record one layer's call.

        Args:
            module: the attention module.
            options: the further keywords of the call.
        """
        if options.get("mask") is not None:
            self.problems.add("computes an attention mask of its own")
        if options.get("softcap"):
            self.problems.add("caps its attention scores (softcap)")
        if options.get("s_aux") is not None:
            self.problems.add("has learned attention sinks")
        if options.get("sliding_window") and sliding_window_of(self.text):
            self.problems.add("has a sliding window")
        if not getattr(module, "is_causal", True):
            self.problems.add("attends in both directions")
        self.kv_shapes.add((key.shape[1], key.shape[3]))
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            self.problems.add("has queries, keys and values of different sizes")

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend from the only token to itself."""
        self.called_layers.append(layer)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def unsupported_reason(self) -> str | None:
        """Return why the model is not supported, as a predicate; None if it is."""
        if self.called_layers != self.expected_layers:
            self.problems.add(
                "does not call AttentionInterface exactly once in each of its `layers`"
            )
        if len(self.kv_shapes) > 1:
            self.problems.add("has layers with keys of different sizes")
        return " and ".join(sorted(self.problems)) or None
