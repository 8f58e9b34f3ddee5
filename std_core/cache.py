"""Keys and values of all slots, lengths per row, and what attention does with them in prefill and in a step.

An object of this file is handed to the model as the keyword `kv` and arrives at the attention function, which calls
its `attend`. Keys are kept after rotation, so entries that are gathered keep their true positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from std_core.kernels.attention import ragged_attention
from std_core.kernels.gather import gather_entries
from std_core.kernels.mass import attention_mass

BLOCK = 256  # entries; caches grow by whole blocks


class Cache:
    """(layers) × (slots, KV heads, capacity, head size), keys and values; grows, never shrinks."""

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str):
        self.key = [torch.zeros(slots, kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self.value = [torch.zeros_like(k) for k in self.key]

    @property
    def capacity(self) -> int:
        return self.key[0].shape[2]

    def reserve(self, entries: int) -> None:
        """Makes room for `entries` per row."""
        if entries > self.capacity:
            more = -(-entries // BLOCK) * BLOCK - self.capacity
            for store in (self.key, self.value):
                for layer, old in enumerate(store):
                    store[layer] = F.pad(old, (0, 0, 0, more))

    def fill(self, layer: int, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes a row from its start; key and value: (KV heads, n, head size)."""
        self.key[layer][row, :, : key.shape[1]] = key
        self.value[layer][row, :, : value.shape[1]] = value

    def write(self, layer: int, lengths: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes T entries per row behind `lengths` (B,); key and value: (B, KV heads, T, head size)."""
        rows = torch.arange(len(lengths), device=lengths.device)[:, None]
        places = lengths[:, None] + torch.arange(key.shape[2], device=lengths.device)
        self.key[layer][rows, :, places] = key.transpose(1, 2)
        self.value[layer][rows, :, places] = value.transpose(1, 2)


@dataclass
class PrefillStep:
    """One prompt into one slot. Gathers the mass of attention that the text behind the video gives to visual tokens.

    `visual`: (m_v,) places of the visual tokens; `text`: m_t, tokens behind the last of them.
    """

    cache: Cache
    row: int
    visual: torch.Tensor
    text: int
    mass: list[torch.Tensor] = field(default_factory=list)  # per layer (KV heads, m_v)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.cache.fill(layer, self.row, key[0], value[0])
        if len(self.visual):
            self.mass.append(attention_mass(query[0, :, -self.text :], key[0], self.visual, scale))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


@dataclass
class DecodeStep:
    """T tokens of every row behind its `lengths`. `mirror` is a second cache, with lengths of its own, that gets the
    same entries: a verification overwrites what the draft had written with what the full model computed (else a draft
    that keeps everything would still drift away from it)."""

    cache: Cache
    lengths: torch.Tensor
    mirror: tuple[Cache, torch.Tensor] | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.cache.write(layer, self.lengths, key, value)
        if self.mirror is not None:
            self.mirror[0].write(layer, self.mirror[1], key, value)
        return ragged_attention(query, self.cache.key[layer], self.cache.value[layer], self.lengths, scale)


def copy_selection(
    full: Cache, draft: Cache, row: int, layer: int, visual: torch.Tensor, chosen: torch.Tensor, length: int
) -> int:
    """Fills a row of the draft's cache with the chosen visual entries, then all text; returns the entries it holds.

    `visual`: (m_v,) places of visual tokens in the prompt; `chosen`: (KV heads, K) among them; `length`: the prompt's.
    """
    is_text = torch.ones(length, dtype=torch.bool, device=visual.device)
    is_text[visual] = False
    text = is_text.nonzero()[:, 0].expand(chosen.shape[0], -1)
    kept = torch.cat([visual[chosen], text], dim=1)
    draft.fill(layer, row, gather_entries(full.key[layer][row], kept), gather_entries(full.value[layer][row], kept))
    return kept.shape[1]
