"""Selection of the visual entries that a draft keeps.

One function per policy, from attention mass to indices among the row's visual tokens.
"""

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
    """Select the visual entries that the draft of one row keeps.

    Args:
        mass: per layer (KV heads, m_v), attention mass from text to visual tokens.
        row_seed: a second seed of the `random` policy, so that rows differ.
        total: sums over the ranks that share the model's heads, for a set that all heads have in
            common.

    Returns:
        Per layer (KV heads, K) indices among the row's visual tokens, ascending.
    """
    if draft.policy == "specvlm":
        per_layer = [m.sum(0).to(mass[0].device) for m in mass]
        selected = _nucleus(total(torch.stack(per_layer).sum(0)), draft)
        return [selected.expand(len(mass[0]), -1)] * len(mass)
    policy = _POLICIES[draft.policy]
    seed = (draft.seed * 1_000_003 + row_seed) * 1_009
    return [policy(m, draft, seed + layer).sort(dim=1).values for layer, m in enumerate(mass)]


def _top_k(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Sparse-to-Dense §3.2: top-K by mean attention of the text tokens, per layer and KV head."""
    return mass.topk(draft.budget(mass.shape[1]), dim=1).indices


def _snapkv(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Crossover §4.1: the sinks, and the top entries of each KV head up to the budget."""
    return _top_k(with_sinks(mass, draft.sinks), draft, seed)


def with_sinks(mass: torch.Tensor, sinks: int) -> torch.Tensor:
    """Mass (…, m_v) with infinite mass for the first entries, so that they are always selected."""
    first = torch.arange(min(sinks, mass.shape[-1]), device=mass.device)
    return mass.index_fill(-1, first, float("inf"))


def _random(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """The control: uniform without replacement, per layer and KV head."""
    drawn = torch.rand(mass.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(draft.budget(mass.shape[1]), dim=1).indices.to(mass.device)


def _window(mass: torch.Tensor, draft: Draft, seed: int) -> torch.Tensor:
    """Attention sinks and the newest entries (StreamingLLM, the baseline of all three papers)."""
    budget = draft.budget(mass.shape[1])
    sinks = min(draft.sinks, budget)
    indices = torch.arange(mass.shape[1], device=mass.device)
    newest = indices[len(indices) - (budget - sinks) :]
    return torch.cat([indices[:sinks], newest]).expand(mass.shape[0], -1)


def _nucleus(mass: torch.Tensor, draft: Draft) -> torch.Tensor:
    """SpecVLM stages I and II: (K,) indices.

    The smallest set with a share λ of the mass, at most K entries; filled up to K at even steps
    through the other entries, in their order in time and space.
    """
    budget = draft.budget(len(mass))
    order = mass.argsort(descending=True)
    cumulative = mass[order].cumsum(0) / mass.sum()
    core = min(budget, int((cumulative < draft.nucleus).sum()) + 1)
    others = order[core:].sort().values
    missing = budget - core
    step = torch.arange(missing, device=mass.device)
    even = (2 * step + 1) * len(others) // max(1, 2 * missing)
    return torch.cat([order[:core], others[even]]).sort().values


_POLICIES = {"std": _top_k, "snapkv": _snapkv, "random": _random, "window": _window}
