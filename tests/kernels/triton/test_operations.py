"""Mass, gather and the cheap products on a GPU against the CPU's, which have definitions of their
own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from std_core.kernels.attention import attend_chunk
from std_core.kernels.attention_mass import attention_mass
from std_core.kernels.gather import gather_entries
from std_core.kernels.low_bit import GROUP, levels_of, low_bit_linear, pack, unpacked
from std_core.kernels.sparse_linear import sparse_linear
from std_core.kernels.triton import attention_mass as triton_attention_mass
from std_core.kernels.triton import gather as triton_gather
from std_core.kernels.triton import low_bit as triton_low_bit
from std_core.kernels.triton import sparse_linear as triton_sparse_linear

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@settings(max_examples=10, deadline=None)
@given(
    DTYPES,
    st.sampled_from([(2, 1), (4, 2), (7, 1)]),
    st.tuples(st.integers(1, 12), st.integers(1, 150), st.sampled_from([16, 64, 80, 128])),
    st.sampled_from([(), (2,)]),
    st.integers(0, 2**31),
)
def test_attention_mass(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: tuple[int, int, int],
    lead: tuple[int, ...],
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    text, visual, dim = size
    query = torch.randn(*lead, heads[0], text, dim, generator=rng).to(dtype)
    key = torch.randn(*lead, heads[1], visual, dim, generator=rng).to(dtype)
    whole = (
        query.float()
        @ key.float().repeat_interleave(heads[0] // heads[1], -3).transpose(-1, -2)
        * 0.1
    ).logsumexp(-1)
    want = attention_mass(query.double(), key.double(), whole, 0.1)
    got = triton_attention_mass.attention_mass(
        query.to(device), key.to(device), whole.to(device), 0.1
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.tuples(st.integers(1, 3), st.integers(1, 90), st.sampled_from([3, 16, 80, 128])),
    st.integers(0, 70),
    st.integers(0, 2**31),
)
def test_gather(
    device: str, dtype: torch.dtype, size: tuple[int, int, int], count: int, seed: int
) -> None:
    """Off a longer cache, of which entries are a part."""
    rng = torch.Generator().manual_seed(seed)
    heads, length, dim = size
    cache = torch.randint(-100, 100, (heads, length + 5, dim), generator=rng).to(dtype)[:, :length]
    chosen = torch.randint(0, length, (heads, count), generator=rng)
    got = triton_gather.gather_entries(cache.to(device), chosen.to(device))
    assert torch.equal(got.cpu(), gather_entries(cache, chosen))


SIZES = st.tuples(
    st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 20).map(lambda n: GROUP * n)
)


@settings(max_examples=20, deadline=None)
@given(
    DTYPES,
    SIZES,
    st.integers(1, 9),
    st.sampled_from([-1.0, 0.5, 1.5, 9.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_sparse_product(
    device: str,
    dtype: torch.dtype,
    size: tuple[int, int],
    rows: int,
    threshold: float,
    biased: bool,
    seed: int,
) -> None:
    """In either layout of the weight."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, size[1], generator=rng).to(dtype)
    weight = torch.randn(*size, generator=rng).to(dtype)
    bias = torch.randn(size[0], generator=rng).to(dtype) if biased else None
    want = sparse_linear(
        x.double(), weight.double(), None if bias is None else bias.double(), threshold
    )
    for w in (weight.to(device), triton_sparse_linear.by_channel(weight.to(device))):
        got = triton_sparse_linear.sparse_linear(
            x.to(device), w, None if bias is None else bias.to(device), threshold
        )
        assert got.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=10 * tolerance)


def test_channels_that_no_row_activates_are_not_read(device: str) -> None:
    x = torch.tensor([[3.0, 0.1, 0.0, 2.0], [0.2, 0.3, 0.0, 4.0]], device=device).repeat(1, 8)
    weight = torch.randn(16, 32, device=device)
    weight.view(16, 8, 4)[:, :, 1:3] = float("nan")
    assert triton_sparse_linear.sparse_linear(x, weight, None, 1.0).isfinite().all()


@settings(max_examples=20, deadline=None)
@given(
    DTYPES, SIZES, st.integers(1, 9), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 2**31)
)
def test_low_bit_product(
    device: str,
    dtype: torch.dtype,
    size: tuple[int, int],
    rows: int,
    bits: int,
    biased: bool,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight, x = (
        torch.randn(*shape, generator=rng).to(dtype) for shape in (size, (2, rows, size[1]))
    )
    bias = torch.randn(size[0], generator=rng).to(dtype) if biased else None
    packed = triton_low_bit.pack(weight.to(device), bits)
    assert packed.weight.numel() * packed.weight.element_size() == weight.numel() * bits // 8
    got = triton_low_bit.low_bit_linear(
        x.to(device), packed, None if bias is None else bias.to(device)
    )
    assert got.dtype == dtype
    plain = unpacked(*levels_of(weight, bits), bits).double()
    want = F.linear(x.double(), plain, None if bias is None else bias.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_spread_over_its_input_channels(device: str, bits: int) -> None:
    """As many channels as real models have, few outputs: several partial sums."""
    weight = torch.randn(16, 3584)
    x = torch.randn(8, 3584)
    packed = triton_low_bit.pack(weight.to(device), bits)
    want = x @ unpacked(*levels_of(weight, bits), bits).T
    torch.testing.assert_close(
        triton_low_bit.low_bit_linear(x.to(device), packed, None).cpu(), want, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_prefill_goes_to_the_fused_kernels(dtype: torch.dtype) -> None:
    """By shapes alone, on a GPU that is not there: PyTorch's operators take what they are given."""
    with FakeTensorMode():
        query = torch.empty(1, 28, 50, 128, dtype=dtype, device="cuda")
        past, new = (
            (torch.empty(1, 4, n, 128, dtype=dtype, device="cuda"),) * 2 for n in (300, 50)
        )
        out, lse = attend_chunk(query, [past], new, 0.1)
    assert out.shape == query.shape and out.dtype == dtype
    assert lse.shape == query.shape[:3] and lse.dtype == torch.float32


def test_a_4_bit_product_goes_to_pytorchs_kernel() -> None:
    with FakeTensorMode():
        weight, x = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((3584, 18944), (8, 18944))
        )
        packed = pack(weight, 4)
        assert packed.weight.dtype == torch.int32 and packed.weight.numel() * 8 == weight.numel()
        assert low_bit_linear(x, packed, None).shape == (8, 3584)
