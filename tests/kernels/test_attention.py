"""Attention of decode steps and prefill chunks, attention mass and gather on a CPU, against float64
definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels import attention
from std_core.kernels.attention_mass import attention_mass
from std_core.kernels.cpu import loader
from std_core.kernels.gather import gather_entries
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment

Reference = Callable[..., Attention]
BOTH = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "pytorch"])
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)])  # query heads, KV heads


@contextmanager
def kernels(compiled: bool, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Use the C++ kernels (skip where there are none) or PyTorch's operations."""
    if not compiled:
        with mock.patch.object(loader, "supports", return_value=False):
            yield
    elif not loader.supports("attend_rows", torch.empty(0, dtype=dtype)):
        pytest.skip("no compiler, or the CPU lacks the instructions")
    else:
        yield


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    HEADS,
    st.integers(1, 8),
    st.sampled_from([8, 32, 64]),
    st.lists(st.integers(0, 60), min_size=4, max_size=4),
    st.lists(st.integers(1, 90), min_size=1, max_size=3),
    st.data(),
)
def test_attend_rows_equals_the_reference(
    reference_rows: Reference,
    compiled: bool,
    rows: int,
    heads: tuple[int, int],
    width: int,
    dim: int,
    lengths: list[int],
    prefix_lengths: list[int],
    data: st.DataObject,
) -> None:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    before = torch.tensor(lengths[:rows])
    query = torch.randn(rows, heads[0], width, dim, generator=rng)
    capacity = int(before.max()) + width + 3
    own = Segment(*(torch.randn(rows, heads[1], capacity, dim, generator=rng) for _ in range(2)))
    shape = (len(prefix_lengths), heads[1], max(prefix_lengths) + 5, dim)
    prefix = Segment(*(torch.randn(*shape, generator=rng) for _ in range(2)))
    prefix_index = st.integers(-1, len(prefix_lengths) - 1)
    prefix_of_row = data.draw(st.lists(prefix_index, min_size=rows, max_size=rows))
    groups = PrefixGroups.from_lists(prefix_of_row, prefix_lengths)
    scale = dim**-0.5
    for shared in ((prefix, groups), (None, None)):
        want, _ = reference_rows(query, own, before, *shared, scale=scale)
        with kernels(compiled):
            got, _ = attention.attend_rows(query, own, before, *shared, scale=scale)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@BOTH
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    HEADS,
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([32, 64, 128]),
    st.lists(st.sampled_from([0, 63, 64, 1000, 1023, 1024, 2050]), min_size=3, max_size=3),
    st.integers(0, 2**31),
)
def test_attend_rows_across_block_and_split_borders(
    reference_rows: Reference,
    compiled: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    width: int,
    dim: int,
    lengths: list[int],
    seed: int,
) -> None:
    """Output and log-sum-exp, with prefixes that one row uses and that two rows share."""
    rng = torch.Generator().manual_seed(seed)
    scale = dim**-0.5
    query = torch.randn(3, heads[0], width, dim, generator=rng).to(dtype)
    entries = [
        torch.randn(3, heads[1], 2050 + width, dim, generator=rng).to(dtype) for _ in range(4)
    ]
    own = Segment(entries[0], entries[1])
    prefix = Segment(entries[2], entries[3])
    groups = PrefixGroups.from_lists([1, 0, 1], [lengths[1], lengths[2]])
    before = torch.tensor(lengths)
    with kernels(compiled, dtype):
        got = attention.attend_rows(query, own, before, prefix, groups=groups, scale=scale)
    want = reference_rows(query, own, before, prefix, groups=groups, scale=scale)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.output.double(), want.output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.logsumexp.double(), want.logsumexp, rtol=1e-3, atol=1e-3)


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    HEADS,
    st.integers(1, 150),
    st.lists(st.integers(0, 140), min_size=0, max_size=2),
    st.integers(0, 2**31),
)
def test_attend_chunk_is_causal_within_the_chunk(
    compiled: bool, heads: tuple[int, int], width: int, past: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads[0], width, 32, generator=rng)
    segments = [
        Segment(*(torch.randn(1, heads[1], n, 32, generator=rng) for _ in range(2)))
        for n in [*past, width]
    ]
    with kernels(compiled):
        got = attention.attend_chunk(query, segments[:-1], segments[-1], 0.25)
    key, value = (
        torch.cat(parts, dim=2).repeat_interleave(heads[0] // heads[1], 1).double()
        for parts in zip(*segments, strict=True)
    )
    scores = query.double() @ key.transpose(2, 3) * 0.25
    scores += torch.full((width, sum(past) + width), float("-inf")).triu(sum(past) + 1)
    want = Attention(scores.softmax(-1) @ value, scores.logsumexp(-1))
    torch.testing.assert_close(got.logsumexp.double(), want.logsumexp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.output.double(), want.output, rtol=1e-4, atol=1e-5)


COUNTS = st.lists(st.integers(0, 700), min_size=4, max_size=4)


@BOTH
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    COUNTS,
    COUNTS,
    st.permutations(range(4)),
    st.integers(0, 3),
)
def test_fixed_gives_a_token_the_same_bits_in_any_batch(
    compiled: bool,
    dtype: torch.dtype,
    lengths: list[int],
    prefix_lengths: list[int],
    order: list[int],
    shift: int,
) -> None:
    """The last token of row 0 beside empty rows, and the same token in another slot, at another of
    the T positions, with its prefix elsewhere in the store, beside rows with more entries.
    """
    rng = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(4, 4, 4, 32, generator=rng).to(dtype)
    own = Segment(*(torch.randn(4, 2, 1536, 32, generator=rng).to(dtype) for _ in range(2)))
    prefix = Segment(*(torch.randn(4, 2, 1024, 32, generator=rng).to(dtype) for _ in range(2)))
    query[:, :, 3 - shift] = query[:, :, 3]

    def attend(
        slots: list[int], stored: list[int], before: list[int], shared: list[int]
    ) -> torch.Tensor:
        """Output of the rows `slots`, whose prefixes lie in the store in the order `stored`."""
        groups = PrefixGroups.from_lists(
            [stored.index(row) if shared[row] else -1 for row in slots],
            [shared[row] for row in stored],
            fixed=True,
        )
        return attention.attend_rows(
            query[slots],
            Segment(own.key[slots], own.value[slots]),
            torch.tensor(before)[slots],
            Segment(prefix.key[stored], prefix.value[stored]),
            groups=groups,
            scale=0.25,
            fixed=True,
        ).output

    rows = [0, 1, 2, 3]
    shifted = [lengths[0] + shift, *lengths[1:]]
    with kernels(compiled, dtype):
        alone = attend(rows, rows, [lengths[0], 0, 0, 0], [prefix_lengths[0], 0, 0, 0])
        batched = attend(list(order), list(reversed(order)), shifted, prefix_lengths)
    assert torch.equal(alone[0, :, 3], batched[order.index(0), :, 3 - shift])


def test_nan_entries_affect_only_the_rows_that_attend_to_them() -> None:
    """Neither another row's NaN entries nor NaN behind a row's length changes its result."""
    query = torch.randn(2, 4, 1, 32)
    cache = torch.randn(2, 2, 200, 32)
    broken = cache.clone()
    broken[0, :, 10] = float("nan")
    broken[1, :, 101:] = float("nan")
    lengths = torch.tensor([100, 100])
    got, expected = (
        attention.attend_rows(query, Segment(x, x), lengths, None, groups=None, scale=0.3).output
        for x in (broken, cache)
    )
    assert got[0].isnan().all() and torch.equal(got[1], expected[1])


def test_an_empty_slot_gives_finite_numbers() -> None:
    query = torch.randn(2, 4, 3, 8)
    cache = torch.randn(2, 2, 20, 8)
    segment = Segment(cache, cache)
    groups = PrefixGroups.from_lists([-1, 0], [0, 0])
    out, _ = attention.attend_rows(
        query, segment, torch.tensor([0, 9]), segment, groups=groups, scale=0.3
    )
    assert out.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(2, 1), (4, 2), (6, 2)]),
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(0, 2**31),
)
def test_attention_mass_is_the_mean_over_text_and_the_sum_over_a_group(
    heads: tuple[int, int], text: int, before: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(heads[0], text, 16, generator=rng)
    key = torch.randn(heads[1], before + text, 16, generator=rng)
    visual = torch.randperm(before, generator=rng)[: max(1, before // 2)].sort().values
    heads_per_kv = heads[0] // heads[1]
    want = torch.zeros(heads[1], len(visual), dtype=torch.float64)
    logsumexp = torch.empty(heads[0], text)
    for head in range(heads[0]):
        kv_head = head // heads_per_kv
        for t in range(text):
            scores = key[kv_head, : before + t + 1].double() @ query[head, t].double() * 0.25
            logsumexp[head, t] = scores.logsumexp(0)
            want[kv_head] += scores.softmax(0)[visual] / text
    got = attention_mass(query, key[:, visual], logsumexp, 0.25)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def test_attention_mass_of_large_keys_is_finite_in_float16() -> None:
    """Products before scaling exceed float16's range: 128 × 30 × 30 is above 65,504."""
    query = torch.full((2, 3, 128), 30.0, dtype=torch.float16)
    key = torch.full((1, 5, 128), 30.0, dtype=torch.float16)
    # a sum of weights far above these entries': only the range matters here
    mass = attention_mass(query, key, torch.full((2, 3), 10_200.0), 128**-0.5)
    assert mass.isfinite().all()


def test_attend_rows_and_chunks_of_large_keys_in_float16(reference_rows: Reference) -> None:
    query = torch.full((1, 2, 3, 128), 30.0, dtype=torch.float16)
    own = Segment(*(torch.full((1, 1, 512, 128), 30.0, dtype=torch.float16) for _ in range(2)))
    lengths = torch.tensor([7])
    scale = 128**-0.5
    got = attention.attend_rows(query, own, lengths, None, groups=None, scale=scale)
    want = reference_rows(query, own, lengths, None, groups=None, scale=scale)
    torch.testing.assert_close(got.output.double(), want.output, rtol=2e-3, atol=0.0)
    torch.testing.assert_close(got.logsumexp.double(), want.logsumexp, rtol=2e-3, atol=0.0)
    chunk = Segment(*(x[:, :, :3] for x in own))
    past = [Segment(*(x[:, :, :7] for x in own))]
    got = attention.attend_chunk(query, past, chunk, scale)
    torch.testing.assert_close(got.output.double(), want.output, rtol=2e-3, atol=0.0)


def test_gather_copies_different_entries_for_each_head() -> None:
    cache = torch.arange(2 * 5 * 3).view(2, 5, 3)
    got = gather_entries(cache, torch.tensor([[0, 4], [2, 2]]))
    assert torch.equal(got, torch.stack([cache[0, [0, 4]], cache[1, [2, 2]]]))
