"""The prefix store: KV entries of what several requests on one video share, computed once.

Holds no references to rows: callers say which store rows are in use.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from std_core.model.cache import KVCache, rows_after_growth


class PrefixKey(NamedTuple):
    """Identity of a prefix: the video, its sampling rate, and all tokens before the question."""

    video_id: str
    fps: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Prefix:
    """State of one store row.

    Args:
        key: None while the row is being filled, for copies, and for requests that share nothing.
        length: entries.
        filled_at: number of the fill, counted over the store's life; 0 if never filled.
    """

    key: PrefixKey | None = None
    length: int = 0
    filled_at: int = 0


class PrefixStore:
    """A cache whose rows hold prefixes, and which prefix each row holds.

    A store outlives a run if the engine keeps prefixes. It has room for at least as many rows as
    the engine has slots, so a free slot always finds a store row that is not in use.

    Args:
        cache: its rows are added as they are used.
        max_rows: most rows.
    """

    def __init__(self, cache: KVCache, max_rows: int):
        self.cache = cache
        self.max_rows = max_rows
        self.prefixes = [Prefix() for _ in range(cache.rows)]
        self._fills = 0

    def add_rows(self, rows: int) -> None:
        """Grow to `rows` rows."""
        self.cache.reserve_rows(rows)
        self.prefixes += [Prefix() for _ in range(rows - len(self.prefixes))]

    @property
    def lengths(self) -> list[int]:
        """Entries in each store row."""
        return [prefix.length for prefix in self.prefixes]

    def find(self, key: PrefixKey | None, in_use: Set[int], exclusive: bool) -> int | None:
        """Return the store row that holds a prefix; None if it has to be computed.

        Args:
            in_use: store rows that running rows read.
            exclusive: copy the prefix if it is in use. Rows that share a prefix are attended in
                another shape than rows that do not, which would change bits under `strict`.
        """
        if key is None:
            return None
        for row, prefix in enumerate(self.prefixes):
            if prefix.key == key:
                return self._copy(row, in_use) if exclusive and row in in_use else row
        return None

    def allocate(self, length: int, in_use: Set[int]) -> int:
        """Return a store row with room for `length` entries.

        The row is one that no request can share, else a new one. If all rows are filled, the prefix
        filled longest ago is evicted.
        """
        row = self._free_row(in_use)
        self.prefixes[row] = Prefix(length=length)
        self.cache.reserve(length)
        return row

    def mark_filled(self, row: int, key: PrefixKey | None) -> None:
        """Record that an allocated row is complete, so that requests with `key` can share it."""
        self._fills += 1
        self.prefixes[row] = replace(self.prefixes[row], key=key, filled_at=self._fills)

    def _copy(self, row: int, in_use: Set[int]) -> int:
        copy = self._free_row(in_use)
        prefix = self.prefixes[row]
        for layer in range(len(self.cache.key)):
            key, value = self.cache.row_segment(layer, row, prefix.length)
            self.cache.write_row(layer, copy, 0, key[0], value=value[0])
        self.prefixes[copy] = replace(prefix, key=None)
        return copy

    def _free_row(self, in_use: Set[int]) -> int:
        free = [row for row in range(len(self.prefixes)) if row not in in_use]
        unshared = [row for row in free if self.prefixes[row].key is None]
        if not unshared and len(self.prefixes) < self.max_rows:
            new = len(self.prefixes)
            self.add_rows(rows_after_growth(new, self.max_rows))
            return new
        return min(unshared or free, key=lambda row: self.prefixes[row].filled_at)
