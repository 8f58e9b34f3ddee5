"""Keys and values, and what attention does with them in prefill and in a decode step.

There are three stores of one kind: prefixes (what several questions on one video share), the rows'
own entries, and the draft's view of a row. An object with `attend` is handed to the model as the
keyword `kv` and arrives at the attention function in each layer. Keys are kept after rotation, so
gathered entries keep their true positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from std_core.kernels.attention import attend_chunk, attend_rows, write_rows
from std_core.kernels.attention_mass import attention_mass
from std_core.kernels.cpu.huge_pages import advise_huge_pages
from std_core.kernels.gather import gather_entries
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.kernels.shared.segments import PrefixGroups, Segment


class KVCache:
    """(layers) × (rows, KV heads, capacity, head size), keys and values; grows, never shrinks.
    `devices`: of each layer."""

    def __init__(
        self, devices: Sequence[Any], rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        self.key = [
            torch.zeros(rows, kv_heads, 0, head_dim, dtype=dtype, device=device)
            for device in devices
        ]
        self.value = [torch.zeros_like(k) for k in self.key]

    @property
    def capacity(self) -> int:
        return self.key[0].shape[2]

    def reserve(self, entries: int) -> None:
        """Makes room for `entries` per row, in whole splits of the attention."""
        if entries > self.capacity:
            more = -(-entries // SPLIT_SIZE) * SPLIT_SIZE - self.capacity
            for store in (self.key, self.value):
                for layer, old in enumerate(store):
                    store[layer] = _longer(old, more)

    def layer(self, layer: int) -> Segment:
        return Segment(self.key[layer], self.value[layer])

    def row(self, layer: int, row: int, length: int) -> Segment:
        """Of one row its first `length` entries, (1, KV heads, length, head size)."""
        return Segment(
            self.key[layer][row : row + 1, :, :length],
            self.value[layer][row : row + 1, :, :length],
        )

    def fill(self, layer: int, row: int, at: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes entries of one row from place `at` on; key and value: (KV heads, n, head size)."""
        self.key[layer][row, :, at : at + key.shape[1]] = key
        self.value[layer][row, :, at : at + value.shape[1]] = value

    def write(
        self, layer: int, lengths: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes T entries per row behind `lengths` (B,); key and value: (B, KV heads, T, head
        size)."""
        write_rows(self.key[layer], lengths, key)
        write_rows(self.value[layer], lengths, value)

    def replace(
        self,
        layer: int,
        at: torch.Tensor,
        valid: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes K entries per row at places `at` (B, K) where `valid` (B, K); key and value: (B,
        K, KV heads, d)."""
        rows = torch.arange(len(at), device=at.device)[:, None]
        for store, new in ((self.key[layer], key), (self.value[layer], value)):
            store[rows, :, at] = torch.where(valid[..., None, None], new, store[rows, :, at])


def _longer(store: torch.Tensor, more: int) -> torch.Tensor:
    """With room for so many entries more, zeros. Attention reads caches from end to end: on a CPU
    with large pages a fifth faster."""
    if store.device.type != "cpu":
        return F.pad(store, (0, 0, 0, more))
    rows, heads, capacity, dim = store.shape
    longer = advise_huge_pages(store.new_empty(rows, heads, capacity + more, dim))
    longer[:, :, :capacity] = store
    longer[:, :, capacity:] = 0
    return longer


@dataclass
class PrefillStep:
    """A chunk of one prompt, behind the `at` entries that `row` of `store` has already, and behind
    a prefix if given.

    `visual`: places in the prefix of its visual tokens, if the attention that the chunk gives them
    is to be gathered."""

    store: KVCache
    row: int
    at: int
    prefix: tuple[KVCache, int, int] | None = None  # store, row, length
    visual: torch.Tensor | None = None
    observers: int | None = None  # so many of the chunk's last tokens are asked; all if None
    mass: list[torch.Tensor] = field(default_factory=list)  # per layer (KV heads, m_v)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        past = [self.store.row(layer, self.row, self.at)]
        if self.prefix is not None:
            store, row, length = self.prefix
            past.append(store.row(layer, row, length))
        out, logsumexp = attend_chunk(query, past, Segment(key, value), scale)
        self.store.fill(layer, self.row, self.at, key[0], value=value[0])
        if self.visual is not None:
            looked_at = past[-1].key[0][:, self.visual.to(query.device)]
            last = slice(-self.observers if self.observers else None, None)
            self.mass.append(
                attention_mass(query[0, :, last], looked_at, logsumexp[0, :, last], scale)
            )
        return out


@dataclass
class AttentionProbe:
    """Gathers where in their prefixes the tokens of a step look, for a selection that is made
    again.

    places: (B, m) of the visual entries, padded with any place. width: the step's first tokens that
    are asked."""

    prefix_of_row: torch.Tensor  # (B,)
    places: torch.Tensor
    width: int
    mass: list[torch.Tensor] = field(default_factory=list)  # per layer (B, KV heads, m)

    def at(
        self, key: torch.Tensor, query: torch.Tensor, logsumexp: torch.Tensor, scale: float
    ) -> None:
        """key: (prefixes, KV heads, n, d)."""
        rows = self.prefix_of_row.to(key.device)[:, None]
        places = self.places.to(key.device)
        looked_at = key[rows, :, places].transpose(1, 2)
        asked = slice(None, self.width)
        self.mass.append(
            attention_mass(query[:, :, asked], looked_at, logsumexp[:, :, asked], scale)
        )


@dataclass
class DecodeStep:
    """T tokens of every row behind its `lengths`, and behind its prefix if there is one.

    `mirror` is a second store, with lengths of its own, that gets the same entries: a verification
    overwrites what the draft had written with what the full model computed (else a draft that keeps
    everything would drift away from it)."""

    own: KVCache
    lengths: torch.Tensor
    prefix: KVCache | None = None
    groups: PrefixGroups | None = None
    mirror: tuple[KVCache, torch.Tensor] | None = None
    fixed: bool = False
    look: AttentionProbe | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.lengths.device != query.device:
            self._move(query.device)
        self.own.write(layer, self.lengths, key, value)
        if self.mirror is not None:
            self.mirror[0].write(layer, self.mirror[1], key, value)
        prefix = self.prefix.layer(layer) if self.prefix is not None else None
        own = self.own.layer(layer)
        out, logsumexp = attend_rows(
            query, own, self.lengths, prefix, groups=self.groups, scale=scale, fixed=self.fixed
        )
        if self.look is not None and prefix is not None:
            self.look.at(prefix.key, query, logsumexp, scale)
        return out

    def _move(self, device: torch.device) -> None:
        """Follows a model whose layers are spread over devices: a layer's caches are where it
        is."""
        self.lengths = self.lengths.to(device)
        self.groups = self.groups.to(device) if self.groups is not None else None
        if self.mirror is not None:
            self.mirror = self.mirror[0], self.mirror[1].to(device)


def gather_draft_kv(
    draft: KVCache, row: int, layer: int, prefix: Segment, kept: torch.Tensor, own: Segment
) -> int:
    """Fills a draft's row with the kept entries of a prefix and all of the row's own; returns the
    entries it holds.

    prefix, own: (1, KV heads, n, head size); kept: (KV heads, K) places in the prefix.
    """
    draft.fill(layer, row, 0, *(gather_entries(x[0], kept.to(x.device)) for x in prefix))
    draft.fill(layer, row, kept.shape[1], *(x[0] for x in own))
    return kept.shape[1] + own[0].shape[2]
