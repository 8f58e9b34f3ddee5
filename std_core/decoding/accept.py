"""Acceptance: how much of a draft the full model confirms. Pure tensor functions, no row waits for
another."""

from __future__ import annotations

import torch


def accept_equal(drafted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Leading drafted tokens that equal the full model's own choice at their place (Sparse-to-Dense
    §3.1): for greedy rows, and for rows whose draft and full model draw with the same noise.

    Args: drafted: (B, γ). target: (B, γ + 1), the full model's choice after the row's last token
        and after each drafted one.

    Returns: (B,) n, 0 ≤ n ≤ γ. What the round adds to a row is `target[:, : n + 1]`: n confirmed
        tokens and the bonus.
    """
    return (drafted == target[:, :-1]).long().cumprod(1).sum(1)


def accept_sampled(
    drafted: torch.Tensor, q: torch.Tensor, p: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: a drafted token stays with probability min(1, p/q); the first that does
    not is drawn again from what p has above q, so what is written is distributed as p.

    Args:
        drafted: (B, γ), drawn from q.
        q: (B, γ, vocabulary) the draft's probabilities.
        p: (B, γ + 1, vocabulary) the full model's.

    Returns:
        n (B,) accepted, and (B, γ + 1) tokens of which the first n + 1 are the round's.
    """
    rows, gamma = drafted.shape
    at = drafted[..., None]
    keep = (
        torch.rand(rows, gamma, generator=generator, device=p.device) * q.gather(2, at)[..., 0]
        < p[:, :-1].gather(2, at)[..., 0]
    )
    n = keep.long().cumprod(1).sum(1)
    row = torch.arange(rows, device=p.device)
    # behind a draft that was accepted whole there is nothing to take away
    taken = q[row, n.clamp(max=gamma - 1)] * (n < gamma)[:, None]
    rest = (p[row, n] - taken).clamp(min=0)
    # p and q equal but for rounding: the rejection was itself rounding, p is the right distribution
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p[row, n])
    bonus = torch.multinomial(rest, 1, generator=generator)
    tokens = torch.cat([drafted, bonus], dim=1).scatter(1, n[:, None], bonus)
    return n, tokens
