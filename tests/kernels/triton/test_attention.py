"""The split-KV kernel against its definition, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels import attention
from std_core.kernels.attention import Groups, Segment
from std_core.kernels.triton import attention as triton_attention

HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (7, 1)])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(device: str, rng: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(device, dtype)


def segment(device: str, rng: torch.Generator, dtype: torch.dtype, *shape: int) -> Segment:
    return random(device, rng, dtype, *shape), random(device, rng, dtype, *shape)


def scores(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
) -> torch.Tensor:
    """The definition's log-sum-exp, (B, query heads, T), in float64."""
    out = torch.empty(query.shape[:3], dtype=torch.float64)
    share = query.shape[1] // own[0].shape[1]
    for b, head, t in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        keys = own[0][b, head // share, : int(lengths[b]) + t + 1]
        if prefix is not None and groups is not None and (p := int(groups.prefix[b])) >= 0:
            keys = torch.cat([prefix[0][p, head // share, : int(groups.lengths[p])], keys])
        out[b, head, t] = (keys.double() @ query[b, head, t].double() * scale).logsumexp(0)
    return out


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
def test_rows_over_two_segments_are_their_definition(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: tuple[int, int, int],
    lengths: list[int],
    prefixes: list[int],
    fixed: bool,
    data: st.DataObject,
) -> None:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows, width, dim = size
    before = torch.tensor(lengths[:rows], device=device)
    query = random(device, rng, dtype, rows, heads[0], width, dim)
    own = segment(device, rng, dtype, rows, heads[1], int(before.max()) + width + 3, dim)
    shared = segment(device, rng, dtype, len(prefixes) + 1, heads[1], max(prefixes) + 5, dim)
    under = data.draw(st.lists(st.integers(-1, len(prefixes) - 1), min_size=rows, max_size=rows))
    groups = Groups.of(under, prefixes, device)
    for prefix in (shared, None):
        want = attention.reference_rows(
            query.cpu(),
            _cpu(own),
            before.cpu(),
            _cpu(prefix),
            groups=groups.to("cpu"),
            scale=dim**-0.5,
        )  # type: ignore[arg-type]
        out, lse = triton_attention.attend_rows(
            query, own, before, prefix, groups=groups, scale=dim**-0.5, fixed=fixed
        )
        assert out.dtype == dtype and lse.dtype == torch.float32
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.cpu().double(), want, rtol=tolerance, atol=tolerance)
        expected = scores(
            query.cpu(),
            _cpu(own),
            before.cpu(),
            _cpu(prefix),
            groups=groups.to("cpu"),
            scale=dim**-0.5,
        )  # type: ignore[arg-type]
        torch.testing.assert_close(lse.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def _cpu(segment: Segment | None) -> Segment | None:
    return None if segment is None else (segment[0].cpu(), segment[1].cpu())


@pytest.mark.parametrize("width", [1, 32])
def test_the_real_models_shapes(device: str, width: int) -> None:
    """Qwen2-VL-7B's 28 query and 4 KV heads of 128, one KV head of them here; and rows that share a
    prefix."""
    rng = torch.Generator().manual_seed(width)
    query = random(device, rng, torch.bfloat16, 2, 7, width, 128)
    own, shared = (segment(device, rng, torch.bfloat16, n, 1, 320, 128) for n in (2, 1))
    before = torch.tensor([200, 3], device=device)
    groups = Groups.of([0, 0], [290], device)
    out, _ = triton_attention.attend_rows(
        query, own, before, shared, groups=groups, scale=128**-0.5
    )
    cpu = query.cpu(), _cpu(own), before.cpu(), _cpu(shared), groups.to("cpu")
    want = attention.reference_rows(*cpu, 128**-0.5)  # type: ignore[arg-type]
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-2, atol=2e-2)


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
def test_fixed_splits_give_a_token_the_same_bits_in_any_batch(
    device: str, dtype: torch.dtype, lengths: list[int], prefixes: list[int], shift: int, spare: int
) -> None:
    """Alone, and in another slot, at another index of the width, beside a longer row, in a larger
    cache."""
    rng = torch.Generator().manual_seed(sum(lengths))
    query = random(device, rng, dtype, 2, 4, 4, 32)
    own, shared = (segment(device, rng, dtype, 2, 2, 1024, 32) for _ in range(2))
    query[:, :, 3 - shift] = query[:, :, 3]

    def attend(order: list[int], before: list[int], seen: list[int], room: int) -> torch.Tensor:
        rows, store = (
            tuple(torch.nn.functional.pad(x[order], (0, 0, 0, room)) for x in segment)
            for segment in (own, shared)
        )
        under = [at if seen[row] else -1 for at, row in enumerate(order)]
        groups = Groups.of(under, [seen[row] for row in order], device, fixed=True)
        at = torch.tensor([before[row] for row in order], device=device)
        return triton_attention.attend_rows(
            query[order], rows, at, store, groups=groups, scale=0.25, fixed=True
        )[0]  # type: ignore[arg-type]

    one = attend([0, 1], [lengths[0], 0], [prefixes[0], 0], 0)[0, :, 3]
    other = attend([1, 0], [lengths[0] + shift, lengths[1]], prefixes, 512 * spare)[1, :, 3 - shift]
    assert torch.equal(one, other)


def test_blocks_log_sum_exp(device: str) -> None:
    """Of a prefix's blocks, for a selection that is made again; none where a row has no prefix."""
    rng = torch.Generator().manual_seed(3)
    query = random(device, rng, torch.float32, 2, 4, 3, 16)
    own, shared = (segment(device, rng, torch.float32, 2, 2, 320, 16) for _ in range(2))
    groups = Groups.of([-1, 1], [40, 200], device)
    _, _, blocks = triton_attention.attend_blocks(
        query, own, torch.tensor([5, 9], device=device), shared, groups=groups, scale=0.3, block=64
    )
    assert blocks.shape == (2, 4, 3, 5)
    assert (blocks[0] == float("-inf")).all() and (blocks[1, ..., 4:] == float("-inf")).all()
    keys = shared[0][1, :, :200].repeat_interleave(2, 0)
    scores = query[1] @ keys.transpose(1, 2) * 0.3
    want = torch.stack(
        [scores[..., at : at + 64].logsumexp(-1) for at in range(0, 200, 64)], dim=-1
    )
    torch.testing.assert_close(blocks[1, ..., :4], want, rtol=1e-4, atol=1e-4)


def test_nothing_is_read_behind_what_is_used(device: str) -> None:
    """Of both segments, and of slots without a row."""
    rng = torch.Generator().manual_seed(4)
    query = random(device, rng, torch.float32, 2, 4, 3, 16)
    own, shared = (segment(device, rng, torch.float32, 2, 2, 300, 16) for _ in range(2))
    for x in own:
        x[0, :, 3:] = x[1, :, 12:] = float("nan")
    for x in shared:
        x[0, :, 7:] = x[1] = float("nan")
    out, lse = triton_attention.attend_rows(
        query,
        own,
        torch.tensor([0, 9], device=device),
        shared,
        groups=Groups.of([-1, 0], [7, 0], device),
        scale=0.3,
    )
    assert out.isfinite().all() and lse.isfinite().all()
