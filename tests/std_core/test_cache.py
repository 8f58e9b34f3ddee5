from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.cache import Cache, copy_selection

SLOTS, HEADS, DIM = 3, 2, 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 300)), max_size=4), st.data())
def test_writes_land_behind_each_rows_length_and_nowhere_else(
    fills: list[tuple[int, int]], data: st.DataObject
) -> None:
    cache = Cache(2, SLOTS, HEADS, DIM, torch.float32, "cpu")
    model = [torch.zeros(HEADS, 0, DIM) for _ in range(SLOTS)]  # layer 1, keys
    for row, length in fills:
        cache.reserve(length)
        model[row] = torch.randn(HEADS, length, DIM)
        cache.fill(1, row, model[row], model[row] + 1)
    for _ in range(data.draw(st.integers(0, 3))):
        width = data.draw(st.integers(1, 5))
        lengths = torch.tensor([m.shape[1] for m in model])
        cache.reserve(int(lengths.max()) + width)
        new = torch.randn(SLOTS, HEADS, width, DIM)
        cache.write(1, lengths, new, new + 1)
        kept = data.draw(st.lists(st.integers(0, width), min_size=SLOTS, max_size=SLOTS))
        model = [torch.cat([m, new[row, :, : kept[row]]], dim=1) for row, m in enumerate(model)]
    for row, m in enumerate(model):
        assert torch.equal(cache.key[1][row, :, : m.shape[1]], m)
        assert torch.equal(cache.value[1][row, :, : m.shape[1]], m + 1)
    assert not cache.key[0].any()


def test_a_selection_holds_the_chosen_visual_entries_and_all_text() -> None:
    full, draft = (Cache(1, 2, HEADS, DIM, torch.float32, "cpu") for _ in range(2))
    full.reserve(10)
    draft.reserve(10)
    entries = torch.arange(HEADS * 10 * DIM, dtype=torch.float32).view(HEADS, 10, DIM)
    full.fill(0, 1, entries, -entries)
    visual, chosen = torch.tensor([2, 3, 4, 5, 6]), torch.tensor([[0, 4], [1, 2]])
    held = copy_selection(full, draft, 1, 0, visual, chosen, length=10)
    assert held == 7
    places = torch.tensor([[2, 6, 0, 1, 7, 8, 9], [3, 4, 0, 1, 7, 8, 9]])
    for head in range(HEADS):
        assert torch.equal(draft.key[0][1, head, :7], entries[head, places[head]])
        assert torch.equal(draft.value[0][1, head, :7], -entries[head, places[head]])
    assert not draft.key[0][0].any()
