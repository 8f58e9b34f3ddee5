from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels import attention
from std_core.kernels.gather import gather_entries
from std_core.kernels.mass import attention_mass


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    st.integers(1, 8),
    st.sampled_from([8, 32, 64]),
    st.lists(st.integers(0, 90), min_size=4, max_size=4),
    st.integers(0, 2**31),
)
def test_ragged_attention_is_its_definition(
    rows: int, heads: tuple[int, int], width: int, dim: int, lengths: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    before = torch.tensor(lengths[:rows])
    capacity = int(before.max()) + width + 3
    query = torch.randn(rows, heads[0], width, dim, generator=rng)
    key, value = (torch.randn(rows, heads[1], capacity, dim, generator=rng) for _ in range(2))
    want = attention.reference(query, key, value, before, dim**-0.5)
    got = attention.cpu(query, key, value, before, dim**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_an_empty_slot_gives_finite_numbers() -> None:
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 20, 8)
    assert attention.cpu(query, cache, cache, torch.tensor([0, 9]), 0.3).isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(2, 1), (4, 2), (6, 2)]), st.integers(1, 6), st.integers(1, 30), st.integers(0, 2**31))
def test_attention_mass_is_the_mean_over_text_and_the_sum_over_a_group(
    heads: tuple[int, int], text: int, before: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    entries = before + text
    query, key = torch.randn(heads[0], text, 16, generator=rng), torch.randn(heads[1], entries, 16, generator=rng)
    visual = torch.randperm(before, generator=rng)[: max(1, before // 2)].sort().values
    group = heads[0] // heads[1]
    want = torch.zeros(heads[1], len(visual), dtype=torch.float64)
    for head in range(heads[0]):
        for t in range(text):
            seen = before + t + 1
            weights = (key[head // group, :seen].double() @ query[head, t].double() * 0.25).softmax(0)
            want[head // group] += weights[visual] / text
    torch.testing.assert_close(attention_mass(query, key, visual, 0.25).double(), want, rtol=1e-4, atol=1e-6)


def test_gather_takes_other_entries_for_each_head() -> None:
    cache = torch.arange(2 * 5 * 3).view(2, 5, 3)
    got = gather_entries(cache, torch.tensor([[0, 4], [2, 2]]))
    assert torch.equal(got, torch.stack([cache[0, [0, 4]], cache[1, [2, 2]]]))
