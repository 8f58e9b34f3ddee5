"""Acceptance: how much of a draft the full model confirms.

Pure tensor functions, row by row. B: rows.
"""

from __future__ import annotations

import torch


def accept_equal(drafted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Count the leading drafted tokens that equal the full model's own choice.

    Sparse-to-Dense §3.1. For greedy rows, and for rows whose draft and full model sample with the
    same noise.

    Args:
        drafted: (B, γ).
        target: (B, γ + 1), the full model's choice after the row's last token and after each
            drafted one.

    Returns:
        (B,) n, 0 ≤ n ≤ γ. The round adds `target[:, : n + 1]` to a row: n accepted tokens and the
        bonus.
    """
    return (drafted == target[:, :-1]).long().cumprod(1).sum(1)


def accept_sampled(
    drafted: torch.Tensor, q: torch.Tensor, p: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens by speculative sampling, so that the output is distributed as p.

    A drafted token is accepted with probability min(1, p/q). The first rejected one is drawn again
    from the normalized positive part of p - q.

    Args:
        drafted: (B, γ), drawn from q.
        q: (B, γ, vocabulary) the draft's probabilities.
        p: (B, γ + 1, vocabulary) the full model's.

    Returns:
        (B,) n accepted tokens, and (B, γ + 1) tokens of which the first n + 1 are the round's.
    """
    rows, gamma = drafted.shape
    at = drafted[..., None]
    q_drafted = q.gather(2, at)[..., 0]
    p_drafted = p[:, :-1].gather(2, at)[..., 0]
    uniform = torch.rand(rows, gamma, generator=generator, device=p.device)
    n = (uniform * q_drafted < p_drafted).long().cumprod(1).sum(1)
    row = torch.arange(rows, device=p.device)
    p_next = p[row, n]
    # if all drafted tokens were accepted, the bonus is drawn from p itself
    q_next = q[row, n.clamp(max=gamma - 1)] * (n < gamma)[:, None]
    rest = (p_next - q_next).clamp(min=0)
    # if p equals q but for rounding, the rejection was a rounding error too: draw from p
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p_next)
    bonus = torch.multinomial(rest, 1, generator=generator)
    tokens = torch.cat([drafted, bonus], dim=1).scatter(1, n[:, None], bonus)
    return n, tokens
