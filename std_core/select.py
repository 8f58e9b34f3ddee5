"""What the draft keeps: one function per policy, from attention mass to places among the visual tokens."""

from __future__ import annotations

import torch

from std_core.types import Draft


def select(draft: Draft, mass: torch.Tensor, layer: int, row_seed: int) -> torch.Tensor:
    """The visual entries that the draft of one row keeps in one layer.

    Args:
        mass: (KV heads, m_v) text-to-visual attention mass.
        row_seed: what the `random` policy draws from besides its own seed, so that rows differ.

    Returns:
        (KV heads, K) places among the row's visual tokens, ascending.
    """
    budget = draft.budget(mass.shape[1])
    if draft.policy == "window":
        return _window(mass, budget, draft.sinks)
    return POLICIES[draft.policy](mass, budget, (draft.seed * 1_000_003 + row_seed) * 1_009 + layer).sort(dim=1).values


def _top(mass: torch.Tensor, budget: int, seed: int) -> torch.Tensor:
    """Sparse-to-Dense §3.2: top-K by mean attention of the text tokens, per layer and KV head."""
    return mass.topk(budget, dim=1).indices


def _random(mass: torch.Tensor, budget: int, seed: int) -> torch.Tensor:
    """The control: uniform, without replacement, per layer and KV head."""
    drawn = torch.rand(mass.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(budget, dim=1).indices.to(mass.device)


def _window(mass: torch.Tensor, budget: int, sinks: int) -> torch.Tensor:
    """Attention sinks and the newest entries (Streaming, the baseline of all three papers)."""
    first = min(sinks, budget)
    places = torch.arange(mass.shape[1], device=mass.device)
    return torch.cat([places[:first], places[len(places) - (budget - first) :]]).expand(mass.shape[0], -1)


def _full(mass: torch.Tensor, budget: int, seed: int) -> torch.Tensor:
    """Everything: the draft is the model itself, so all it drafts must be accepted."""
    return torch.arange(mass.shape[1], device=mass.device).expand(mass.shape[0], -1)


POLICIES = {"std": _top, "random": _random, "full": _full}
