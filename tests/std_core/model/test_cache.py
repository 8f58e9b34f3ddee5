from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.model.cache import KVCache, gather_draft_kv

SLOTS = 3
HEADS = 2
DIM = 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 300)), max_size=4), st.data())
def test_writes_land_behind_each_rows_length_and_nowhere_else(
    fills: list[tuple[int, int]], data: st.DataObject
) -> None:
    cache = KVCache(["cpu"] * 2, rows=SLOTS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)
    model = [torch.zeros(HEADS, 0, DIM) for _ in range(SLOTS)]  # layer 1, keys
    for row, length in fills:  # chunk by chunk
        at = model[row].shape[1]
        cache.reserve(at + length)
        chunk = torch.randn(HEADS, length, DIM)
        cache.fill(1, row, at, chunk, value=chunk + 1)
        model[row] = torch.cat([model[row], chunk], dim=1)
    for _ in range(data.draw(st.integers(0, 3))):
        width = data.draw(st.integers(1, 5))
        lengths = torch.tensor([m.shape[1] for m in model])
        cache.reserve(int(lengths.max()) + width)
        new = torch.randn(SLOTS, HEADS, width, DIM)
        cache.write(1, lengths, new, new + 1)
        kept = data.draw(st.lists(st.integers(0, width), min_size=SLOTS, max_size=SLOTS))
        model = [torch.cat([m, new[row, :, : kept[row]]], dim=1) for row, m in enumerate(model)]
    for row, m in enumerate(model):
        key, value = cache.row(1, row, m.shape[1])
        assert torch.equal(key[0], m)
        assert torch.equal(value[0], m + 1)
    assert not cache.key[0].any()


def test_a_view_holds_the_kept_entries_of_the_prefix_and_all_of_the_rows_own() -> None:
    prefix, own, draft = (
        KVCache(["cpu"], rows=2, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)
        for _ in range(3)
    )
    entries = torch.arange(HEADS * 10 * DIM, dtype=torch.float32).view(HEADS, 10, DIM)
    for cache in (prefix, own, draft):
        cache.reserve(10)
    prefix.fill(0, 0, 0, entries, value=-entries)
    own.fill(0, 1, 0, entries[:, :3] + 1000, value=entries[:, :3])
    kept = torch.tensor([[2, 6], [3, 4]])
    held = gather_draft_kv(draft, 1, 0, prefix.row(0, 0, 7), kept=kept, own=own.row(0, 1, 3))
    assert held == 5
    for head in range(HEADS):
        assert torch.equal(draft.key[0][1, head, :2], entries[head, kept[head]])
        assert torch.equal(draft.value[0][1, head, :2], -entries[head, kept[head]])
    assert torch.equal(draft.key[0][1, :, 2:5], entries[:, :3] + 1000)
    assert not draft.key[0][0].any()
