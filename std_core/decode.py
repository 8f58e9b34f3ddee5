"""One round of decoding: draft, verify, accept, commit (Sparse-to-Dense §3.1). A dense step is a round that drafts
nothing. All tensors are per row; no row waits for another's length."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from std_core.accept import accept_greedy
from std_core.cache import Cache, DecodeStep
from std_core.model import Model


@dataclass
class Slots:
    """The rows that decode together; filled by the engine at admission, moved on by `decode_round`. All (slots,)."""

    full: Cache
    draft: Cache
    length: torch.Tensor  # entries in the full cache
    draft_length: torch.Tensor  # entries in the draft's cache
    position: torch.Tensor  # M-RoPE position of the row's last token
    last: torch.Tensor  # its newest token, not yet in a cache
    left: torch.Tensor  # tokens it may still write
    active: torch.Tensor  # bool

    @classmethod
    def empty(cls, model: Model, count: int) -> Slots:
        length, draft_length, position, last, left = torch.zeros(5, count, dtype=torch.long, device=model.device)
        active = torch.zeros(count, dtype=torch.bool, device=model.device)
        return cls(model.new_cache(count), model.new_cache(count), length, draft_length, position, last, left, active)


@dataclass(frozen=True)
class Round:
    """What a round gave each row."""

    tokens: torch.Tensor  # (slots, γ + 1); the first `kept` of a row are its new tokens
    kept: torch.Tensor  # (slots,)
    accepted: torch.Tensor  # (slots,) drafted tokens among them
    proposed: torch.Tensor  # (slots,) drafted tokens that had a chance: what lies behind a row's end does not count
    stopped: torch.Tensor  # (slots,) bool: the last of them is a stop id
    broken: torch.Tensor  # (slots,) bool: the full model gave no finite logits


@torch.inference_mode()
def decode_round(model: Model, slots: Slots, gamma: int, stop_ids: torch.Tensor) -> Round:
    """Moves all active rows on by 1 to γ + 1 tokens; γ = 0 is the dense step."""
    slots.full.reserve(int(slots.length.max()) + gamma + 1)
    if gamma:
        slots.draft.reserve(int(slots.draft_length.max()) + gamma + 1)
    drafted = draft(model, slots, gamma)
    target, broken = verify(model, slots, drafted)
    accepted = accept_greedy(drafted, target)
    return commit(slots, target, accepted, stop_ids, broken)


def draft(model: Model, slots: Slots, gamma: int) -> torch.Tensor:
    """(slots, γ) tokens that the sparse view of the model would write."""
    tokens = [slots.last[:, None]]
    for i in range(gamma):
        kv = DecodeStep(slots.draft, slots.draft_length + i)
        logits = model.step(tokens[-1], slots.position[:, None] + i, kv)
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, dim=1)[:, 1:]


def verify(model: Model, slots: Slots, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The full model's choice after the last token and after each drafted one, (slots, γ + 1), in one step; and which
    rows got no finite logits."""
    tokens = torch.cat([slots.last[:, None], drafted], dim=1)
    positions = slots.position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    mirror = (slots.draft, slots.draft_length) if drafted.shape[1] else None
    logits = model.step(tokens, positions, DecodeStep(slots.full, slots.length, mirror))
    return logits.argmax(-1), ~logits.isfinite().all(-1).all(-1)


def commit(
    slots: Slots, target: torch.Tensor, accepted: torch.Tensor, stop_ids: torch.Tensor, broken: torch.Tensor
) -> Round:
    """Lengths move up by what is kept: the confirmed tokens and the bonus, cut at a stop id and at the row's limit.
    What a rejected token had written lies behind the length and is overwritten."""
    places = torch.arange(target.shape[1], device=target.device)
    stops = torch.isin(target, stop_ids) & (places <= accepted[:, None])
    first_stop = torch.where(stops.any(1), stops.long().argmax(1), target.shape[1])
    kept = torch.minimum(torch.minimum(accepted, first_stop) + 1, slots.left) * slots.active
    stopped = (first_stop < kept) & slots.active
    slots.length += kept
    slots.draft_length += kept
    slots.position += kept
    slots.left -= kept
    newest = target.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    slots.last = torch.where(slots.active, newest, slots.last)
    proposed = torch.where(kept <= accepted, kept, target.shape[1] - 1)
    return Round(target, kept, torch.minimum(accepted, kept), proposed, stopped, broken & slots.active)
