"""What a row's draft reads besides the full model's caches.

Selected entries of the prefix, copied into the draft cache, or a second model's own entries.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from std_core.decoding.row_errors import isolated
from std_core.decoding.select import select
from std_core.decoding.slots import DraftView, Slots
from std_core.engine.context import EngineContext
from std_core.engine.prompt import Prompt
from std_core.engine.row import DraftKV
from std_core.model.cache import PrefillStep, gather_draft_kv
from std_core.types import Draft


class BuiltView(NamedTuple):
    """Entries that a row's draft reads per layer and KV head, and where the selected ones are."""

    entries: int
    draft_kv: DraftKV | None = None


def view_of(draft: Draft | None) -> DraftView:
    """Which caches a draft reads."""
    if draft is None:
        return "target"
    if draft.model:
        return "draft_model"
    return "target" if draft.policy in ("full", "ngram") else "selected"


class DraftViewBuilder:
    """Fills the draft cache of a slot, after its prompt has been prefilled.

    Args:
        draft: None decodes densely; then there is nothing to fill.
    """

    def __init__(self, context: EngineContext, slots: Slots, draft: Draft | None):
        self.context = context
        self.model = context.model
        self.slots = slots
        self.draft = draft

    @property
    def needs_attention_mass(self) -> bool:
        """Whether prefill has to collect the attention that the question pays to the prefix."""
        return self.draft is not None and self.slots.view != "target"

    def entries(self, prompt: Prompt) -> int:
        """Entries per layer and KV head that the draft cache will hold for a prompt."""
        assert self.draft is not None
        selectable = len(prompt.inputs.selectable_positions)
        kept = selectable
        if selectable and self.draft.policy != "full":
            kept = self.draft.budget(selectable)
        return prompt.length - selectable + kept

    def build(
        self, prompt: Prompt, slot: int, prefix: int, mass: Sequence[torch.Tensor]
    ) -> Generator[None, None, BuiltView]:
        """Select entries and fill the slot's row of the draft cache; yields between pieces of work.

        Args:
            prefix: row of the prefix store; -1 for none.
            mass: per layer (KV heads, m_v), attention from the question to the selectable entries.
        """
        if self.draft is None or self.slots.view == "target":
            # prompt lookup reads no entries
            reads_nothing = self.draft is not None and self.draft.policy == "ngram"
            return BuiltView(0 if reads_nothing else prompt.length)
        selected = self._select(self.draft, prompt, mass)
        if self.slots.view == "draft_model":
            kept = self._kept_by_second_model(prompt, selected)
            entries = yield from self._prefill_second_model(self.draft, prompt, slot, kept)
            return BuiltView(entries)
        return self._gather(prompt, slot, prefix, selected)

    # ------------------------------------------------------------------------------------ selection

    def _select(
        self, draft: Draft, prompt: Prompt, mass: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (KV heads, K) indices into the selectable positions; empty if all are kept."""
        if not prompt.prefix_length or draft.policy == "full":
            return []
        return select(draft, mass, row_seed=prompt.length, total=self.model.tp_group.all_reduce)

    def _positions(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the prefix that can be selected, and those that are always kept."""
        selectable = prompt.inputs.selectable_positions.to(self.model.device)
        always = torch.ones(prompt.prefix_length, dtype=torch.bool, device=self.model.device)
        always[selectable] = False
        return selectable, always.nonzero()[:, 0]

    # -------------------------------------------------------------------- entries of the full model

    def _gather(
        self, prompt: Prompt, slot: int, prefix: int, selected: list[torch.Tensor]
    ) -> BuiltView:
        """Copy the kept entries of the prefix, and all of the suffix, into the draft cache."""
        slots = self.slots
        selectable, always = self._positions(prompt)
        slots.draft.reserve(self.entries(prompt))
        entries = 0
        for layer in range(self.model.layers):
            kept = always.expand(self.model.kv_heads, -1)
            if selected:
                chosen = selectable[selected[layer].to(selectable.device)]
                kept = torch.cat([kept, chosen], dim=1)
            shared = slots.prefix.row_segment(layer, max(prefix, 0), prompt.prefix_length)
            suffix = slots.suffix.row_segment(layer, slot, prompt.length - prompt.prefix_length)
            entries = gather_draft_kv(slots.draft, slot, layer, shared, kept=kept, suffix=suffix)
        slots.draft_length[slot] = entries
        count = selected[0].shape[1] if selected else 0
        return BuiltView(entries, DraftKV(selectable, start=len(always), count=count))

    # ------------------------------------------------------------------------------ a second model

    def _kept_by_second_model(self, prompt: Prompt, selected: list[torch.Tensor]) -> torch.Tensor:
        """Positions of the prefix that the second model is fed.

        It is fed one set of tokens: what was selected for the target's first layer and KV head.
        """
        selectable, always = self._positions(prompt)
        chosen = selectable
        if selected:
            # ranks hold different heads; all take rank 0's selection
            first_head = selected[0][0].to(selectable.device)
            chosen = selectable[self.model.tp_group.broadcast(first_head)]
        return torch.cat([always, chosen]).sort().values

    def _prefill_second_model(
        self, draft: Draft, prompt: Prompt, slot: int, kept: torch.Tensor
    ) -> Generator[None, None, int]:
        """Prefill the second model with the kept prefix and the suffix, at their true positions.

        Returns the number of its entries.
        """
        second = self.context.draft_models.get(draft)
        inputs = prompt.inputs
        slots = self.slots
        with isolated("the second model's vision tower"):
            positions, _ = second.position_ids(inputs)
            features = second.encode_vision(inputs) if prompt.visual_tokens else None
        yield
        embeds = second.embed(prompt.ids[None].to(second.device), inputs.token_types, features)
        suffix = torch.arange(prompt.prefix_length, prompt.length, device=kept.device)
        fed = torch.cat([kept, suffix])
        slots.draft.reserve(len(fed))
        for start in range(0, len(fed), self.context.prefill_chunk):
            chunk = fed[start : start + self.context.prefill_chunk]
            kv = PrefillStep(slots.draft, slot, start)
            second.prefill_chunk(embeds[:, chunk], positions[..., chunk], kv)
            # rounds between chunks rewrite the slot behind the last token; writing one place
            # further protects it
            slots.draft_length[slot] = start + len(chunk) + 1
            yield
        slots.draft_length[slot] = len(fed)
        return len(fed)
