"""The split-KV kernel against its definition, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment
from std_core.kernels.triton import attention as triton_attention

Reference = Callable[..., Attention]
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (7, 1)])  # query heads, KV heads
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(device: str, rng: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(device, dtype)


def random_segment(device: str, rng: torch.Generator, dtype: torch.dtype, *shape: int) -> Segment:
    return Segment(random(device, rng, dtype, *shape), random(device, rng, dtype, *shape))


@settings(max_examples=18, deadline=None)
@given(
    st.sampled_from(list(TOLERANCE)),
    HEADS,
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([16, 32, 64, 80, 128])),
    st.lists(st.integers(0, 260), min_size=3, max_size=3),
    st.lists(st.integers(1, 300), min_size=1, max_size=2),
    st.booleans(),
    st.data(),
)
def test_attend_rows_equals_the_reference(
    device: str,
    reference_rows: Reference,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: tuple[int, int, int],
    lengths: list[int],
    prefix_lengths: list[int],
    fixed: bool,
    data: st.DataObject,
) -> None:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows, width, dim = size
    before = torch.tensor(lengths[:rows], device=device)
    query = random(device, rng, dtype, rows, heads[0], width, dim)
    own = random_segment(device, rng, dtype, rows, heads[1], int(before.max()) + width + 3, dim)
    shared = random_segment(
        device, rng, dtype, len(prefix_lengths) + 1, heads[1], max(prefix_lengths) + 5, dim
    )
    prefix_index = st.integers(-1, len(prefix_lengths) - 1)
    prefix_of_row = data.draw(st.lists(prefix_index, min_size=rows, max_size=rows))
    groups = PrefixGroups.from_lists(prefix_of_row, prefix_lengths, device)
    tolerance = TOLERANCE[dtype]
    for prefix in (shared, None):
        arguments = {"groups": groups, "scale": dim**-0.5}
        want = reference_rows(query, own, before, prefix, **arguments)
        got = triton_attention.attend_rows(query, own, before, prefix, **arguments, fixed=fixed)
        assert got.output.dtype == dtype and got.logsumexp.dtype == torch.float32
        output = got.output.cpu().double()
        torch.testing.assert_close(output, want.output, rtol=tolerance, atol=tolerance)
        logsumexp = got.logsumexp.cpu().double()
        torch.testing.assert_close(logsumexp, want.logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 32])
def test_the_shapes_of_a_real_model(device: str, reference_rows: Reference, width: int) -> None:
    """Qwen2-VL-7B has 28 query and 4 KV heads of 128, here one KV head; two rows share a prefix."""
    rng = torch.Generator().manual_seed(width)
    query = random(device, rng, torch.bfloat16, 2, 7, width, 128)
    own = random_segment(device, rng, torch.bfloat16, 2, 1, 320, 128)
    shared = random_segment(device, rng, torch.bfloat16, 1, 1, 320, 128)
    before = torch.tensor([200, 3], device=device)
    groups = PrefixGroups.from_lists([0, 0], [290], device)
    arguments = {"groups": groups, "scale": 128**-0.5}
    got, _ = triton_attention.attend_rows(query, own, before, shared, **arguments)
    want, _ = reference_rows(query, own, before, shared, **arguments)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-2, atol=2e-2)


COUNTS = st.lists(st.integers(0, 700), min_size=2, max_size=2)


@pytest.mark.usefixtures("row_independent_products")
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    COUNTS,
    COUNTS,
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_fixed_gives_a_token_the_same_bits_in_any_batch(
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    prefix_lengths: list[int],
    shift: int,
    spare_splits: int,
) -> None:
    """The last token of row 0 beside an empty row, and the same token in another slot, at another
    of the T positions, beside a longer row, in a larger cache.
    """
    rng = torch.Generator().manual_seed(sum(lengths))
    query = random(device, rng, dtype, 2, 4, 4, 32)
    own, shared = (random_segment(device, rng, dtype, 2, 2, 1024, 32) for _ in range(2))
    query[:, :, 3 - shift] = query[:, :, 3]

    def attend(
        order: list[int], before: list[int], shared_lengths: list[int], spare: int
    ) -> torch.Tensor:
        rows, prefixes = (
            Segment(*(F.pad(x[order], (0, 0, 0, spare)) for x in segment))
            for segment in (own, shared)
        )
        groups = PrefixGroups.from_lists(
            [slot if shared_lengths[row] else -1 for slot, row in enumerate(order)],
            [shared_lengths[row] for row in order],
            device,
            fixed=True,
        )
        lengths_in_order = torch.tensor([before[row] for row in order], device=device)
        return triton_attention.attend_rows(
            query[order], rows, lengths_in_order, prefixes, groups=groups, scale=0.25, fixed=True
        ).output

    alone = attend([0, 1], [lengths[0], 0], [prefix_lengths[0], 0], 0)
    batched = attend([1, 0], [lengths[0] + shift, lengths[1]], prefix_lengths, 512 * spare_splits)
    assert torch.equal(alone[0, :, 3], batched[1, :, 3 - shift])


def test_entries_behind_the_used_length_are_not_read(device: str) -> None:
    """In both segments, and in slots without a row."""
    rng = torch.Generator().manual_seed(4)
    query = random(device, rng, torch.float32, 2, 4, 3, 16)
    own, shared = (random_segment(device, rng, torch.float32, 2, 2, 300, 16) for _ in range(2))
    for x in own:
        x[0, :, 3:] = float("nan")
        x[1, :, 12:] = float("nan")
    for x in shared:
        x[0, :, 7:] = float("nan")
        x[1] = float("nan")
    out, lse = triton_attention.attend_rows(
        query,
        own,
        torch.tensor([0, 9], device=device),
        shared,
        groups=PrefixGroups.from_lists([-1, 0], [7, 0], device),
        scale=0.3,
    )
    assert out.isfinite().all() and lse.isfinite().all()
