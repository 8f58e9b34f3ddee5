"""Sparse and low-bit projections against their definitions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels.cpu import loader
from std_core.kernels.low_bit import (
    BLOCK,
    GROUP,
    Packed,
    levels_of,
    low_bit_linear,
    pack,
    packable,
    unpacked,
)
from std_core.kernels.sparse_linear import laid_out, sparse_linear, sparsified

SIZES = st.tuples(
    st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 5).map(lambda n: GROUP * n)
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 9), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 2**31))
def test_a_packed_product_is_that_of_the_unpacked_weights(
    size: tuple[int, int], rows: int, bits: int, biased: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(*size, generator=rng)
    x = torch.randn(2, rows, size[1], generator=rng)
    bias = torch.randn(size[0], generator=rng) if biased else None
    with mock.patch.object(loader, "serves", return_value=False):
        packed = pack(weight, bits)
    levels, scale = levels_of(weight, bits)
    plain = unpacked(levels, scale, bits)
    want = F.linear(x, plain, bias)
    torch.testing.assert_close(low_bit_linear(x, packed, bias), want, rtol=1e-4, atol=1e-4)
    elsewhere = Packed(plain, packed.scale, bits, "plain")
    torch.testing.assert_close(low_bit_linear(x, elsewhere, bias), want, rtol=1e-4, atol=1e-4)
    step = scale if bits == 8 else scale[..., 0].max()
    assert (plain - weight).abs().max() <= 0.501 * step.max()


@settings(max_examples=50, deadline=None)
@given(
    DTYPES,
    st.integers(1, 90),
    st.integers(1, 400),
    st.integers(1, 11),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_our_packed_product_is_its_definition_and_near_the_full_one(
    dtype: torch.dtype, out: int, width: int, rows: int, bits: int, biased: bool, seed: int
) -> None:
    if not loader.serves(f"int{bits}", torch.empty(0, dtype=dtype)):
        pytest.skip("no compiler here, or no such instructions")
    rng = torch.Generator().manual_seed(seed)
    weight, x, bias = (
        torch.randn(*size, generator=rng).to(dtype)
        for size in ((out, width), (rows, width), (out,))
    )
    x[:, 0] *= 50  # an activation far above the others
    got = low_bit_linear(x[None], pack(weight, bits), bias if biased else None)[0].double()
    padded = F.pad(weight.float(), (0, -width % BLOCK))
    levels, scale = levels_of(padded, bits)
    plain = unpacked(levels, scale, bits)[:, :width].double()
    want = F.linear(x.bfloat16().double(), plain, bias.double() if biased else None)
    size = (x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)) + 1
    assert ((got - want).abs() / size).max() < (1e-5 if dtype == torch.float32 else 5e-3)
    full = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert ((got - full).abs() / size).max() < (0.02 if bits == 8 else 0.12)


def test_bytes_are_those_of_the_bits() -> None:
    weight = torch.randn(256, 256)
    with mock.patch.object(loader, "serves", return_value=False):
        assert pack(weight, 8).nbytes == 256 * 256 + 256 * 4
        assert pack(weight, 4).nbytes == 256 * 256 // 2 + 256 * 256 // GROUP * 2 * 4
        assert not packable(torch.zeros(427, 192), 4) and not packable(torch.zeros(64, 40), 4)
        assert packable(torch.zeros(427, 192), 8)
    if loader.serves("int4", weight):
        assert pack(weight, 8).nbytes == 256 * 256 + 256 * 4
        assert pack(weight, 4).nbytes == 256 * 256 // 2 + 256 * 256 // GROUP * 2 * 4
        assert packable(torch.zeros(427, 192), 4)


@settings(max_examples=40, deadline=None)
@given(
    DTYPES,
    st.integers(1, 12).map(lambda n: 32 * n),
    st.integers(1, 200),
    st.integers(1, 4),
    st.floats(0, 2.5),
    st.integers(0, 2**31),
)
def test_small_channels_count_as_nothing(
    dtype: torch.dtype, out: int, width: int, rows: int, threshold: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=rng).to(dtype)
    x = torch.randn(1, rows, width, generator=rng).to(dtype)
    bias = torch.randn(out, generator=rng).to(dtype)
    threshold = float(
        torch.tensor(threshold, dtype=dtype)
    )  # PyTorch compares in the tensor's own type
    want = F.linear(sparsified(x, threshold).double(), weight.double(), bias.double())
    assert bool((sparsified(x, threshold) != 0).eq(x.abs() > threshold).all())
    near = 1e-4 if dtype == torch.float32 else 2e-2
    for stored in (weight, laid_out(weight)):
        got = sparse_linear(x, stored, bias, threshold).double()
        torch.testing.assert_close(got, want, rtol=near, atol=near * 10)
