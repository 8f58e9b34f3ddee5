"""Acceptance: how much of a draft the full model confirms. Pure tensor functions."""

from __future__ import annotations

import torch


def accept_greedy(drafted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Leading drafted tokens that equal the full model's own choice at their place (Sparse-to-Dense §3.1).

    Args:
        drafted: (B, γ).
        target: (B, γ + 1), the full model's choice after the row's last token and after each drafted one.

    Returns:
        (B,) n, 0 ≤ n ≤ γ. What the round adds to a row is `target[:, : n + 1]`: n confirmed tokens and the bonus.
    """
    return (drafted == target[:, :-1]).long().cumprod(1).sum(1)
