"""What the draft keeps: one function per policy, from attention mass to places among the visual
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from std_core.types import Draft


def select(
    draft: Draft,
    mass: Sequence[torch.Tensor],
    row_seed: int,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda mass: mass,
) -> list[torch.Tensor]:
    """The visual entries that the draft of one row keeps.

    Args: mass: per layer (KV heads, m_v), text-to-visual attention mass. row_seed: what the
        `random` policy draws from besides its own seed, so that rows differ. total: sums over the
        processes that share the model's heads, for a set that all heads have in common.

    Returns:
        Per layer (KV heads, K) places among the row's visual tokens, ascending.
    """
    if draft.policy == "specvlm":
        whole = total(torch.stack([m.sum(0).to(mass[0].device) for m in mass]).sum(0))
        return [_nucleus(whole, draft).expand(len(mass[0]), -1)] * len(mass)
    seeds = ((draft.seed * 1_000_003 + row_seed) * 1_009 + layer for layer in range(len(mass)))
    return [
        _POLICIES[draft.policy](m, draft, seed).sort(dim=1).values
        for m, seed in zip(mass, seeds, strict=True)
    ]


def _top(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Sparse-to-Dense §3.2: top-K by mean attention of the text tokens, per layer and KV head."""
    return mass.topk(draft.budget(mass.shape[1]), dim=1).indices


def _snap(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Crossover §4.1: the sinks, and the top entries of each KV head up to the budget."""
    return _top(with_sinks(mass, draft.sinks), draft, seed)


def with_sinks(mass: torch.Tensor, sinks: int) -> torch.Tensor:
    """Mass (…, m_v) under which the first entries are chosen before all others."""
    return mass.index_fill(
        -1, torch.arange(min(sinks, mass.shape[-1]), device=mass.device), float("inf")
    )


def _random(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """The control: uniform, without replacement, per layer and KV head."""
    drawn = torch.rand(mass.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(draft.budget(mass.shape[1]), dim=1).indices.to(mass.device)


def _window(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Attention sinks and the newest entries (Streaming, the baseline of all three papers)."""
    budget = draft.budget(mass.shape[1])
    first = min(draft.sinks, budget)
    places = torch.arange(mass.shape[1], device=mass.device)
    return torch.cat([places[:first], places[len(places) - (budget - first) :]]).expand(
        mass.shape[0], -1
    )


def _nucleus(mass: torch.Tensor, draft: Draft) -> torch.Tensor:
    """SpecVLM: (K,) the smallest set with λ of the mass, at most K; what is left up to K at even
    steps through the others, in their order in time and space."""
    budget = draft.budget(len(mass))
    order = mass.argsort(descending=True)
    held = mass[order].cumsum(0) / mass.sum()
    core = min(budget, int((held < draft.nucleus).sum()) + 1)
    others = order[core:].sort().values
    step = torch.arange(budget - core, device=mass.device)
    even = (2 * step + 1) * len(others) // max(1, 2 * (budget - core))
    return torch.cat([order[:core], others[even]]).sort().values


_POLICIES = {"std": _top, "snapkv": _snap, "random": _random, "window": _window}
