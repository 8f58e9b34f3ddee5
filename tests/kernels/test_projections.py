"""Sparse and low-bit projections against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels.low_bit import GROUP, Packed, _levels4, _levels8, low_bit_linear, pack, packable, unpacked
from std_core.kernels.sparse_linear import sparse_linear

SIZES = st.tuples(st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 5).map(lambda n: GROUP * n))


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 9), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 2**31))
def test_a_packed_product_is_that_of_the_unpacked_weights(
    size: tuple[int, int], rows: int, bits: int, biased: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(*size, generator=rng), torch.randn(2, rows, size[1], generator=rng)
    bias = torch.randn(size[0], generator=rng) if biased else None
    packed = pack(weight, bits)
    levels, scale = (_levels8 if bits == 8 else _levels4)(weight)
    plain = unpacked(levels, scale, bits)
    want = F.linear(x, plain, bias)
    torch.testing.assert_close(low_bit_linear(x, packed, bias), want, rtol=1e-4, atol=1e-4)
    elsewhere = Packed(packed.weight, packed.scale, bits, plain)
    torch.testing.assert_close(low_bit_linear(x, elsewhere, bias), want, rtol=1e-4, atol=1e-4)
    step = scale if bits == 8 else scale[..., 0].max()
    assert (plain - weight).abs().max() <= 0.501 * step.max()


def test_bytes_are_those_of_the_bits() -> None:
    weight = torch.randn(256, 256)
    assert pack(weight, 8).nbytes == 256 * 256 + 256 * 4
    assert pack(weight, 4).nbytes == 256 * 256 // 2 + 256 * 256 // GROUP * 2 * 4
    assert not packable(torch.zeros(427, 192), 4) and not packable(torch.zeros(64, 40), 4)
    assert packable(torch.zeros(427, 192), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_channels_count_as_nothing(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(5, 4, dtype=dtype), torch.randn(5, dtype=dtype)
    x = torch.tensor([[0.5, -2.0, 0.1, -0.4]], dtype=dtype)
    want = F.linear(torch.tensor([[0.5, -2.0, 0.0, 0.0]], dtype=dtype), weight, bias)
    assert torch.equal(sparse_linear(x, weight, bias, 0.45), want)
