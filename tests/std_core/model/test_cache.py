from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.model.cache import KVCache, gather_draft_kv

ROWS = 3
HEADS = 2
DIM = 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 300)), max_size=4), st.data())
def test_writes_change_the_entries_behind_each_rows_length_and_no_others(
    chunks: list[tuple[int, int]], data: st.DataObject
) -> None:
    cache = KVCache(["cpu"] * 2, rows=ROWS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)
    expected = [torch.zeros(HEADS, 0, DIM) for _ in range(ROWS)]  # layer 1, keys
    for row, length in chunks:
        start = expected[row].shape[1]
        cache.reserve(start + length)
        chunk = torch.randn(HEADS, length, DIM)
        cache.write_row(1, row, start, chunk, value=chunk + 1)
        expected[row] = torch.cat([expected[row], chunk], dim=1)
    for _ in range(data.draw(st.integers(0, 3))):
        width = data.draw(st.integers(1, 5))
        lengths = torch.tensor([keys.shape[1] for keys in expected])
        cache.reserve(int(lengths.max()) + width)
        new = torch.randn(ROWS, HEADS, width, DIM)
        cache.write_rows(1, lengths, new, new + 1)
        accepted = data.draw(st.lists(st.integers(0, width), min_size=ROWS, max_size=ROWS))
        expected = [
            torch.cat([keys, new[row, :, : accepted[row]]], dim=1)
            for row, keys in enumerate(expected)
        ]
    for row, keys in enumerate(expected):
        segment = cache.row_segment(1, row, keys.shape[1])
        assert torch.equal(segment.key[0], keys)
        assert torch.equal(segment.value[0], keys + 1)
    assert not cache.key[0].any()


def test_a_draft_row_holds_the_kept_prefix_entries_and_the_whole_suffix() -> None:
    prefix, suffix, draft = (
        KVCache(["cpu"], rows=2, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)
        for _ in range(3)
    )
    entries = torch.arange(HEADS * 10 * DIM, dtype=torch.float32).view(HEADS, 10, DIM)
    for cache in (prefix, suffix, draft):
        cache.reserve(10)
    prefix.write_row(0, 0, 0, entries, value=-entries)
    suffix.write_row(0, 1, 0, entries[:, :3] + 1000, value=entries[:, :3])
    kept = torch.tensor([[2, 6], [3, 4]])
    written = gather_draft_kv(
        draft,
        1,
        0,
        prefix.row_segment(0, 0, 7),
        kept=kept,
        suffix=suffix.row_segment(0, 1, 3),
    )
    assert written == 5
    for head in range(HEADS):
        assert torch.equal(draft.key[0][1, head, :2], entries[head, kept[head]])
        assert torch.equal(draft.value[0][1, head, :2], -entries[head, kept[head]])
    assert torch.equal(draft.key[0][1, :, 2:5], entries[:, :3] + 1000)
    assert not draft.key[0][0].any()


@pytest.mark.parametrize(
    ("entries", "lengths"), [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)]
)
def test_entries_of_another_dtype_are_refused(entries: torch.dtype, lengths: torch.dtype) -> None:
    cache = KVCache(["cpu"], rows=2, kv_heads=1, head_dim=8, dtype=torch.float32)
    cache.reserve(4)
    new = torch.ones(2, 1, 1, 8, dtype=entries)
    with pytest.raises(TypeError, match="the cache's dtype"):
        cache.write_rows(0, torch.zeros(2, dtype=lengths), new, new)
    assert not cache.key[0].any()
