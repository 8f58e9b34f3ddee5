"""Reselection of draft entries while a row is being decoded, by the attention of its newest tokens.

For text that follows a video: the question alone does not say which scene the text will come to.
Costs one pass over the visual keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from std_core.decoding.select import with_sinks
from std_core.decoding.slots import Slots
from std_core.engine.row import DraftKV, Row
from std_core.model.cache import AttentionProbe
from std_core.types import Draft


def attention_probe_of(
    rows: Sequence[Row | None], slots: Slots, width: int
) -> AttentionProbe | None:
    """Make a probe for a verification that collects the attention to each row's candidates.

    Args:
        width: tokens per row whose attention counts.

    Returns:
        None if no row has selected entries.
    """
    draft_kvs = _draft_kvs(rows, slots.total.device)
    if not any(kv.count for kv in draft_kvs):
        return None
    candidates = pad_sequence([kv.candidates for kv in draft_kvs], batch_first=True)
    return AttentionProbe(slots.groups.prefix_of_row.clamp(min=0), candidates, width)


def reselect(draft: Draft, slots: Slots, rows: Sequence[Row | None], probe: AttentionProbe) -> None:
    """Replace each row's selected entries by those with the largest attention now.

    Their number stays the same.

    Args:
        probe: after a verification; its mass is per layer (B, KV heads, m), m the most candidates
            of a row.
    """
    device = slots.total.device
    draft_kvs = _draft_kvs(rows, device)
    sizes = torch.tensor([len(kv.candidates) for kv in draft_kvs], device=device)[:, None]
    start = torch.tensor([kv.start for kv in draft_kvs], device=device)[:, None]
    count = torch.tensor([kv.count for kv in draft_kvs], device=device)[:, None]
    most = int(count.max())
    step = torch.arange(most, device=device)
    slots.draft.reserve(int(start.max()) + most)
    padding = torch.arange(probe.positions.shape[1], device=device) >= sizes  # (B, m)
    prefixes = probe.prefix_of_row[:, None, None]
    heads = torch.arange(slots.prefix.key[0].shape[1], device=device)
    for layer, mass in enumerate(probe.mass):
        if draft.policy == "snapkv":
            mass = with_sinks(mass, draft.sinks)
        mass = mass.to(device).masked_fill(padding[:, None], float("-inf"))
        top = mass.topk(most, dim=2).indices
        positions = probe.positions[:, None].expand(-1, len(heads), -1).gather(2, top)
        keys = slots.prefix.key[layer]
        values = slots.prefix.value[layer]
        # with layers spread over devices, a layer's caches are on its own device
        to = keys.device
        where = (prefixes.to(to), heads[:, None].to(to), positions.to(to))
        slots.draft.overwrite(
            layer,
            (start + step).to(to),
            (step < count).to(to),
            key=keys[where].transpose(1, 2),
            value=values[where].transpose(1, 2),
        )


def _draft_kvs(rows: Sequence[Row | None], device: torch.device) -> list[DraftKV]:
    """Of each slot; one without entries for slots that have no row or no selection."""
    none = DraftKV(torch.zeros(0, dtype=torch.long, device=device), start=0, count=0)
    return [row.draft_kv if row is not None and row.draft_kv is not None else none for row in rows]
