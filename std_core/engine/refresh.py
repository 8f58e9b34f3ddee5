"""A selection made again while a row is being written, from what its newest tokens look at. For
text that moves through a video: the question alone does not say which scene comes next. It costs
one pass over the visual keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from std_core.decoding.round import Slots
from std_core.decoding.select import with_sinks
from std_core.engine.row import Row
from std_core.model.cache import AttentionProbe
from std_core.types import Draft


def look_of(rows: Sequence[Row | None], slots: Slots, width: int) -> AttentionProbe | None:
    """What a verification of `width` tokens per row has to gather; None where no row has anything
    to choose from."""
    if not any(row is not None and row.view is not None and row.view.count for row in rows):
        return None
    device = slots.total.device
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    places = [
        row.view.places if row is not None and row.view is not None else nothing for row in rows
    ]
    return AttentionProbe(
        slots.groups.prefix_of_row.clamp(min=0), pad_sequence(places, batch_first=True), width
    )


def reselect(draft: Draft, slots: Slots, rows: Sequence[Row | None], look: AttentionProbe) -> None:
    """Puts the visual entries that matter most by now in the place of those that were chosen
    before, of each row as many as it had."""
    views = [row.view if row is not None else None for row in rows]
    device = slots.total.device
    sizes, at, count = (
        torch.tensor([getattr(v, name) if v is not None else 0 for v in views], device=device)[
            :, None
        ]
        for name in ("size", "at", "count")
    )
    most = int(count.max())
    step = torch.arange(most, device=device)
    slots.draft.reserve(int(at.max()) + most)
    beyond = torch.arange(look.places.shape[1], device=device) >= sizes  # (B, m)
    prefixes = look.prefix_of_row[:, None, None]
    heads = torch.arange(slots.prefix.key[0].shape[1], device=device)
    for layer, mass in enumerate(look.mass):
        if draft.policy == "snapkv":
            mass = with_sinks(mass, draft.sinks)
        top = mass.to(device).masked_fill(beyond[:, None], float("-inf")).topk(most, dim=2).indices
        places = look.places[:, None].expand(-1, len(heads), -1).gather(2, top)
        there = slots.prefix.key[layer].device
        where = prefixes.to(there), heads[:, None].to(there), places.to(there)
        key, value = (
            store[layer][where].transpose(1, 2) for store in (slots.prefix.key, slots.prefix.value)
        )
        slots.draft.replace(
            layer, (at + step).to(there), (step < count).to(there), key, value=value
        )
