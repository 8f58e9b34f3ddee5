from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels import attention
from std_core.kernels.attention import Groups
from std_core.kernels.attention_mass import attention_mass
from std_core.kernels.cpu import loader
from std_core.kernels.gather import gather_entries

BOTH = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "pytorch"])


@contextmanager
def kernels(compiled: bool, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """The C++ kernels, where this machine has them, or PyTorch's operations."""
    if not compiled:
        with mock.patch.object(loader, "serves", return_value=False):
            yield
    elif not loader.serves("attend_rows", torch.empty(0, dtype=dtype)):
        pytest.skip("no compiler here, or no such instructions")
    else:
        yield


HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)])


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
def test_rows_over_two_segments_are_their_definition(
    compiled: bool,
    rows: int,
    heads: tuple[int, int],
    width: int,
    dim: int,
    lengths: list[int],
    prefixes: list[int],
    data: st.DataObject,
) -> None:
    with kernels(compiled):
        _over_two_segments(rows, heads, width, dim, lengths=lengths, prefixes=prefixes, data=data)


def _over_two_segments(
    rows: int,
    heads: tuple[int, int],
    width: int,
    dim: int,
    lengths: list[int],
    prefixes: list[int],
    data: st.DataObject,
) -> None:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    before = torch.tensor(lengths[:rows])
    query = torch.randn(rows, heads[0], width, dim, generator=rng)
    own = tuple(
        torch.randn(rows, heads[1], int(before.max()) + width + 3, dim, generator=rng)
        for _ in range(2)
    )
    shared = tuple(
        torch.randn(len(prefixes), heads[1], max(prefixes) + 5, dim, generator=rng)
        for _ in range(2)
    )
    under = data.draw(st.lists(st.integers(-1, len(prefixes) - 1), min_size=rows, max_size=rows))
    groups = Groups.of(under, prefixes)
    want = attention.reference_rows(query, own, before, shared, groups=groups, scale=dim**-0.5)  # type: ignore[arg-type]
    got, _ = attention.attend_rows(query, own, before, shared, groups=groups, scale=dim**-0.5)  # type: ignore[arg-type]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    alone, _ = attention.attend_rows(query, own, before, None, groups=None, scale=dim**-0.5)  # type: ignore[arg-type]
    torch.testing.assert_close(
        alone.double(),
        attention.reference_rows(query, own, before, None, groups=None, scale=dim**-0.5),  # type: ignore[arg-type]
        rtol=1e-4,
        atol=1e-5,
    )


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
def test_long_rows_and_their_logsumexp(
    compiled: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    width: int,
    dim: int,
    lengths: list[int],
    seed: int,
) -> None:
    """Over the borders of blocks, splits and chunks, under prefixes of their own and shared
    ones."""
    rng = torch.Generator().manual_seed(seed)
    query, *stores = (
        torch.randn(3, n, m, dim, generator=rng).to(dtype)
        for n, m in ((heads[0], width), *[(heads[1], 2050 + width)] * 4)
    )
    own = (stores[0], stores[1])
    shared = (stores[2], stores[3])
    groups = Groups.of([1, 0, 1], [lengths[1], lengths[2]])
    with kernels(compiled, dtype):
        got, lse = attention.attend_rows(
            query, own, torch.tensor(lengths), shared, groups=groups, scale=dim**-0.5
        )
    want = attention.reference_rows(
        query, own, torch.tensor(lengths), shared, groups=groups, scale=dim**-0.5
    )
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=near, atol=near)
    key = torch.cat([shared[0][0, :, : lengths[1]], own[0][1, :, : lengths[1] + 1]], dim=1)
    scores = (
        key.repeat_interleave(heads[0] // heads[1], 0).double()
        @ query[1, :, 0, :, None].double()
        * dim**-0.5
    )
    torch.testing.assert_close(
        lse[1, :, 0].double(), scores[..., 0].logsumexp(-1), rtol=1e-3, atol=1e-3
    )


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    HEADS,
    st.integers(1, 150),
    st.lists(st.integers(0, 140), min_size=0, max_size=2),
    st.integers(0, 2**31),
)
def test_a_chunk_sees_its_past_and_itself_causally(
    compiled: bool, heads: tuple[int, int], width: int, past: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads[0], width, 32, generator=rng)
    segments = [
        tuple(torch.randn(1, heads[1], n, 32, generator=rng) for _ in range(2))
        for n in [*past, width]
    ]
    with kernels(compiled):
        out, logsumexp = attention.attend_chunk(query, segments[:-1], segments[-1], 0.25)  # type: ignore[arg-type]
    key, value = (
        torch.cat([s[i] for s in segments], dim=2)
        .repeat_interleave(heads[0] // heads[1], 1)
        .double()
        for i in (0, 1)
    )
    scores = query.double() @ key.transpose(2, 3) * 0.25
    scores += torch.full((width, sum(past) + width), float("-inf")).triu(sum(past) + 1)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ value, rtol=1e-4, atol=1e-5)


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
def test_fixed_shapes_give_a_token_the_same_bits_in_any_company(
    compiled: bool,
    dtype: torch.dtype,
    lengths: list[int],
    prefixes: list[int],
    places: list[int],
    shift: int,
) -> None:
    """The last token of row 0 alone, and in another slot, at another place of its width, under
    another row of the prefix store, among rows that see more."""
    rng = torch.Generator().manual_seed(sum(lengths))
    query, own, shared = (
        torch.randn(2, 4, 2 * n, m, 32, generator=rng).to(dtype)
        for n, m in ((3, 4), (1, 1536), (1, 1024))
    )
    query = query[0]
    alone = [lengths[0], 0, 0, 0], [prefixes[0], 0, 0, 0]
    query[:, :, 3 - shift] = query[:, :, 3]

    def attend(
        slots: list[int], stored: list[int], before: list[int], seen: list[int]
    ) -> torch.Tensor:
        """Rows `slots`, whose prefixes lie in `stored` of the store."""
        lies = [stored.index(row) for row in slots]
        groups = Groups.of(
            [at if seen[row] else -1 for row, at in zip(slots, lies, strict=True)],
            [seen[r] for r in stored],
            fixed=True,
        )
        rows, store = (
            tuple(x[order] for x in segment) for segment, order in ((own, slots), (shared, stored))
        )
        return attention.attend_rows(
            query[slots],
            rows,
            torch.tensor(before)[slots],
            store,
            groups=groups,
            scale=0.25,
            fixed=True,
        )[0]  # type: ignore[arg-type]

    with kernels(compiled, dtype):
        one = attend([0, 1, 2, 3], [0, 1, 2, 3], *alone)[0, :, 3]
        lengths[0] += shift
        other = attend(list(places), list(reversed(places)), lengths, prefixes)[
            places.index(0), :, 3 - shift
        ]
    assert torch.equal(one, other)


def test_what_is_no_number_is_seen_by_those_who_look_at_it_alone() -> None:
    """One row's broken entries, and what lies behind a row's length, stay out of the others'
    results."""
    query = torch.randn(2, 4, 1, 32)
    cache = torch.randn(2, 2, 200, 32)
    broken = cache.clone()
    broken[0, :, 10] = float("nan")
    broken[1, :, 101:] = float("nan")
    out, _ = attention.attend_rows(
        query, (broken, broken), torch.tensor([100, 100]), None, groups=None, scale=0.3
    )
    whole, _ = attention.attend_rows(
        query, (cache, cache), torch.tensor([100, 100]), None, groups=None, scale=0.3
    )
    assert out[0].isnan().all() and torch.equal(out[1], whole[1])


def test_an_empty_slot_gives_finite_numbers() -> None:
    query = torch.randn(2, 4, 3, 8)
    cache = torch.randn(2, 2, 20, 8)
    groups = Groups.of([-1, 0], [0, 0])
    out, _ = attention.attend_rows(
        query, (cache, cache), torch.tensor([0, 9]), (cache, cache), groups=groups, scale=0.3
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
    group = heads[0] // heads[1]
    want = torch.zeros(heads[1], len(visual), dtype=torch.float64)
    logsumexp = torch.empty(heads[0], text)
    for head in range(heads[0]):
        for t in range(text):
            scores = key[head // group, : before + t + 1].double() @ query[head, t].double() * 0.25
            logsumexp[head, t] = scores.logsumexp(0)
            want[head // group] += scores.softmax(0)[visual] / text
    got = attention_mass(query, key[:, visual], logsumexp, 0.25)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def test_gather_takes_other_entries_for_each_head() -> None:
    cache = torch.arange(2 * 5 * 3).view(2, 5, 3)
    got = gather_entries(cache, torch.tensor([[0, 4], [2, 2]]))
    assert torch.equal(got, torch.stack([cache[0, [0, 4]], cache[1, [2, 2]]]))
