"""KV caches, and the attention over them in a prefill chunk and in a decode step.

There are three caches of one class: the prefixes that several questions on one video share; the
rows' suffixes, which hold each row's own entries behind its prefix; and the draft's selected view
of each row. Keys are stored after rotation, so gathered entries keep their true positions.

A `PrefillStep` or `DecodeStep` is passed to the model as the keyword `kv`; transformers hands it
down to the attention function, which calls `attend` in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from std_core.kernels.attention import attend_chunk, attend_rows, write_rows
from std_core.kernels.attention_mass import attention_mass
from std_core.kernels.cpu.huge_pages import advise_huge_pages
from std_core.kernels.gather import gather_entries
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.kernels.shared.segments import PrefixGroups, Segment


class KVCache:
    """Keys and values per layer, (rows, KV heads, capacity, head size) each.

    Rows are added as they are used. The capacity is that of the longest row; it grows in whole
    splits of the attention kernels. Neither shrinks. Which entries of a row are valid is not stored
    here.
    """

    def __init__(
        self, devices: Sequence[Any], rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        """
        Args:
            devices: of each layer.
        """
        self.key = [
            torch.zeros(rows, kv_heads, 0, head_dim, dtype=dtype, device=device)
            for device in devices
        ]
        self.value = [torch.zeros_like(key) for key in self.key]

    @property
    def shape(self) -> torch.Size:
        """Of each layer's keys and values. They have moved in memory if and only if it changed."""
        return self.key[0].shape

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def capacity(self) -> int:
        """Entries per row."""
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(x.nbytes for x in (*self.key, *self.value))

    def reserve(self, entries: int) -> None:
        """Grow the capacity to at least `entries` per row."""
        if entries > self.capacity:
            self._grow(self.rows, -(-entries // SPLIT_SIZE) * SPLIT_SIZE)

    def reserve_rows(self, rows: int) -> None:
        """Grow the number of rows to at least `rows`."""
        if rows > self.rows:
            self._grow(rows, self.capacity)

    def _grow(self, rows: int, capacity: int) -> None:
        """Replace layer by layer, so that only one layer exists twice at a time."""
        for store in (self.key, self.value):
            for layer, old in enumerate(store):
                store[layer] = _grown(old, rows, capacity)

    def segment(self, layer: int) -> Segment:
        """Return a layer's keys and values of all rows."""
        return Segment(self.key[layer], self.value[layer])

    def row_segment(self, layer: int, row: int, length: int) -> Segment:
        """Return the first `length` entries of one row, (1, KV heads, length, head size)."""
        return Segment(
            self.key[layer][row : row + 1, :, :length],
            self.value[layer][row : row + 1, :, :length],
        )

    def write_row(
        self, layer: int, row: int, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write n entries of one row at index `start`; key and value: (KV heads, n, head size)."""
        end = start + key.shape[1]
        self.key[layer][row, :, start:end] = key
        self.value[layer][row, :, start:end] = value

    def write_rows(
        self, layer: int, lengths: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write T entries of every row at index `lengths` (B,).

        Args:
            key, value: (B, KV heads, T, head size).
        """
        write_rows(self.key[layer], lengths, key)
        write_rows(self.value[layer], lengths, value)

    def overwrite(
        self,
        layer: int,
        indices: torch.Tensor,
        mask: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Write K entries of every row at `indices` (B, K) where `mask` (B, K) is set.

        Args:
            key, value: (B, K, KV heads, head size).
        """
        rows = torch.arange(len(indices), device=indices.device)[:, None]
        for store, new in ((self.key[layer], key), (self.value[layer], value)):
            store[rows, :, indices] = torch.where(
                mask[..., None, None], new, store[rows, :, indices]
            )


def rows_after_growth(rows: int, most: int) -> int:
    """Rows of a cache whose `rows` rows are all in use and that needs one more.

    The number doubles: adding rows one by one would copy a cache as often as it has rows.
    """
    return min(max(1, 2 * rows), most)


def _grown(store: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """Append zero rows and entries. Huge pages make attention on a CPU a fifth faster."""
    old_rows, heads, old_capacity, dim = store.shape
    grown = store.new_empty(rows, heads, capacity, dim)
    if store.device.type == "cpu":
        grown = advise_huge_pages(grown)
    grown[:old_rows, :, :old_capacity] = store
    grown[:old_rows, :, old_capacity:] = 0
    grown[old_rows:] = 0
    return grown


# ------------------------------------------------------------------------------------------ prefill


class PrefixEntries(NamedTuple):
    """One prefix in the prefix cache."""

    cache: KVCache
    row: int
    length: int


@dataclass
class PrefillStep:
    """A chunk of one prompt, written to one row of a cache.

    Args:
        cache: that the chunk is written to.
        row: of the cache.
        start: entries that the row has already; the chunk follows them.
        prefix: that precedes the row's entries.
        scored_positions: (m,) positions in the prefix. If given, `mass` collects the attention that
            the chunk's tokens give them, as the score for KV selection.
        observation_window: only so many of the chunk's last tokens count for the score; None: all.
        mass: per layer (KV heads, m); filled by `attend`.
    """

    cache: KVCache
    row: int
    start: int
    prefix: PrefixEntries | None = None
    scored_positions: torch.Tensor | None = None
    observation_window: int | None = None
    mass: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend from the chunk and write its entries.

        Args:
            query: (1, query heads, T, head size).
            key, value: (1, KV heads, T, head size).

        Returns:
            (1, query heads, T, head size).
        """
        past = [self.cache.row_segment(layer, self.row, self.start)]
        if self.prefix is not None:
            prefix = self.prefix.cache.row_segment(layer, self.prefix.row, self.prefix.length)
            past.append(prefix)
        output, logsumexp = attend_chunk(query, past, Segment(key, value), scale)
        self.cache.write_row(layer, self.row, self.start, key[0], value=value[0])
        if self.scored_positions is not None and self.prefix is not None:
            scored_keys = prefix.key[0][:, self.scored_positions.to(query.device)]
            window = slice(-self.observation_window if self.observation_window else None, None)
            self.mass.append(
                attention_mass(query[0, :, window], scored_keys, logsumexp[0, :, window], scale)
            )
        return output


# ------------------------------------------------------------------------------------------- decode


class MirrorCache(NamedTuple):
    """A second cache that receives a step's entries, at its own lengths (B,)."""

    cache: KVCache
    lengths: torch.Tensor


@dataclass
class AttentionProbe:
    """Collects the attention that a decode step gives prefix entries, to repeat a KV selection.

    Args:
        prefix_of_row: (B,) the row's prefix.
        positions: (B, m) of the scored entries in the prefix; padding may be any valid position.
        width: only the step's first tokens count, so many of each row.
        mass: per layer (B, KV heads, m); filled by `record`.
    """

    prefix_of_row: torch.Tensor
    positions: torch.Tensor
    width: int
    mass: list[torch.Tensor] = field(default_factory=list)

    def record(
        self, key: torch.Tensor, query: torch.Tensor, logsumexp: torch.Tensor, scale: float
    ) -> None:
        """Append one layer's mass.

        Args:
            key: of all prefixes, (prefixes, KV heads, n, head size).
            query: (B, query heads, T, head size).
            logsumexp: (B, query heads, T).
        """
        rows = self.prefix_of_row.to(key.device)[:, None]
        positions = self.positions.to(key.device)
        scored_keys = key[rows, :, positions].transpose(1, 2)
        first = slice(None, self.width)
        self.mass.append(
            attention_mass(query[:, :, first], scored_keys, logsumexp[:, :, first], scale)
        )


@dataclass
class DecodeStep:
    """T tokens of every row, written to the suffix cache behind the rows' lengths.

    Args:
        suffix: the cache that the tokens are written to.
        lengths: (B,) entries of each row in it.
        prefix: the prefix cache, if rows have prefixes.
        groups: the rows' prefixes.
        mirror: gets the same entries. A verification overwrites the draft's entries with the full
            model's; otherwise even a draft that keeps every entry would diverge from it.
        fixed: splits of fixed size, see `kernels.attention`.
        attention_probe: records the attention given to prefix entries.
    """

    suffix: KVCache
    lengths: torch.Tensor
    prefix: KVCache | None = None
    groups: PrefixGroups | None = None
    mirror: MirrorCache | None = None
    fixed: bool = False
    attention_probe: AttentionProbe | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write the tokens' entries and attend from them.

        Args:
            query: (B, query heads, T, head size).
            key, value: (B, KV heads, T, head size).

        Returns:
            (B, query heads, T, head size).
        """
        if self.lengths.device != query.device:
            self._move(query.device)
        self.suffix.write_rows(layer, self.lengths, key, value)
        if self.mirror is not None:
            self.mirror.cache.write_rows(layer, self.mirror.lengths, key, value)
        prefix = self.prefix.segment(layer) if self.prefix is not None else None
        output, logsumexp = attend_rows(
            query,
            self.suffix.segment(layer),
            self.lengths,
            prefix,
            groups=self.groups,
            scale=scale,
            fixed=self.fixed,
        )
        if self.attention_probe is not None and prefix is not None:
            self.attention_probe.record(prefix.key, query, logsumexp, scale)
        return output

    def _move(self, device: torch.device) -> None:
        """Move the step's tensors to the next layer's device, in a model spread over several."""
        self.lengths = self.lengths.to(device)
        if self.groups is not None:
            self.groups = self.groups.to(device)
        if self.mirror is not None:
            self.mirror = MirrorCache(self.mirror.cache, self.mirror.lengths.to(device))


# -------------------------------------------------------------------------------------------- draft


def gather_draft_kv(
    draft: KVCache, row: int, layer: int, prefix: Segment, kept: torch.Tensor, suffix: Segment
) -> int:
    """Fill a row of the draft's cache with the kept entries of its prefix and its whole suffix.

    Args:
        prefix, suffix: of the row, (1, KV heads, n, head size).
        kept: (KV heads, K) indices in the prefix.

    Returns:
        The entries written per KV head.
    """
    kept_key = gather_entries(prefix.key[0], kept.to(prefix.key.device))
    kept_value = gather_entries(prefix.value[0], kept.to(prefix.value.device))
    draft.write_row(layer, row, 0, kept_key, value=kept_value)
    draft.write_row(layer, row, kept.shape[1], suffix.key[0], value=suffix.value[0])
    return kept.shape[1] + suffix.key.shape[2]
