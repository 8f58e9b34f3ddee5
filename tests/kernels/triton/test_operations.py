"""Attention mass, gather, sparse and low-bit products on a GPU against the CPU's versions, which
have tests against definitions.
"""

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
from std_core.kernels.low_bit import low_bit_linear, pack_weight
from std_core.kernels.shared.low_bit_format import GROUP_SIZE, dequantize, quantize
from std_core.kernels.shared.segments import Segment
from std_core.kernels.sparse_linear import channel_major, sparse_linear
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
def test_attention_mass_equals_the_cpu_version(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: tuple[int, int, int],
    batch: tuple[int, ...],
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    text, visual, dim = size
    query = torch.randn(*batch, heads[0], text, dim, generator=rng).to(dtype)
    key = torch.randn(*batch, heads[1], visual, dim, generator=rng).to(dtype)
    logsumexp = (
        query.float()
        @ key.float().repeat_interleave(heads[0] // heads[1], -3).transpose(-1, -2)
        * 0.1
    ).logsumexp(-1)
    want = attention_mass(query.double(), key.double(), logsumexp, 0.1)
    got = triton_attention_mass.attention_mass(
        query.to(device), key.to(device), logsumexp.to(device), 0.1
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
def test_gather_equals_the_cpu_version(
    device: str, dtype: torch.dtype, size: tuple[int, int, int], count: int, seed: int
) -> None:
    """From a slice of a longer cache, which is not contiguous."""
    rng = torch.Generator().manual_seed(seed)
    heads, length, dim = size
    cache = torch.randint(-100, 100, (heads, length + 5, dim), generator=rng).to(dtype)[:, :length]
    indices = torch.randint(0, length, (heads, count), generator=rng)
    got = triton_gather.gather_entries(cache.to(device), indices.to(device))
    assert torch.equal(got.cpu(), gather_entries(cache, indices))


SIZES = st.tuples(
    st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 20).map(lambda n: GROUP_SIZE * n)
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
def test_sparse_linear_equals_the_cpu_version(
    device: str,
    dtype: torch.dtype,
    size: tuple[int, int],
    rows: int,
    threshold: float,
    biased: bool,
    seed: int,
) -> None:
    """With a row-major and a channel-major weight."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, size[1], generator=rng).to(dtype)
    weight = torch.randn(*size, generator=rng).to(dtype)
    bias = torch.randn(size[0], generator=rng).to(dtype) if biased else None
    want = sparse_linear(
        x.double(), weight.double(), None if bias is None else bias.double(), threshold
    )
    for w in (weight.to(device), channel_major(weight.to(device))):
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
def test_low_bit_linear_equals_the_product_of_the_dequantized_weight(
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
    packed = triton_low_bit.pack_weight(weight.to(device), bits)
    assert packed.weight.numel() * packed.weight.element_size() == weight.numel() * bits // 8
    got = triton_low_bit.low_bit_linear(
        x.to(device), packed, None if bias is None else bias.to(device)
    )
    assert got.dtype == dtype
    dequantized = dequantize(*quantize(weight, bits), bits).double()
    want = F.linear(x.double(), dequantized, None if bias is None else bias.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_low_bit_product_with_split_input_channels(device: str, bits: int) -> None:
    """Many input and few output channels: several partial sums per output."""
    weight = torch.randn(16, 3584)
    x = torch.randn(8, 3584)
    packed = triton_low_bit.pack_weight(weight.to(device), bits)
    want = x @ dequantize(*quantize(weight, bits), bits).T
    torch.testing.assert_close(
        triton_low_bit.low_bit_linear(x.to(device), packed, None).cpu(), want, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_uses_pytorchs_fused_kernels(dtype: torch.dtype) -> None:
    """Shapes only, with fake tensors: the operators accept the arguments."""
    with FakeTensorMode():
        query = torch.empty(1, 28, 50, 128, dtype=dtype, device="cuda")
        past, new = (
            Segment(*[torch.empty(1, 4, n, 128, dtype=dtype, device="cuda")] * 2) for n in (300, 50)
        )
        out, lse = attend_chunk(query, [past], new, 0.1)
    assert out.shape == query.shape and out.dtype == dtype
    assert lse.shape == query.shape[:3] and lse.dtype == torch.float32


def test_4_bit_bfloat16_uses_pytorchs_packed_product() -> None:
    with FakeTensorMode():
        weight, x = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((3584, 18944), (8, 18944))
        )
        packed = pack_weight(weight, 4)
        assert packed.weight.dtype == torch.int32 and packed.weight.numel() * 8 == weight.numel()
        assert low_bit_linear(x, packed, None).shape == (8, 3584)
