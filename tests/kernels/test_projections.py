"""Sparse and low-bit projections on a CPU against their definitions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels.cpu import loader
from std_core.kernels.cpu.low_bit import BLOCK
from std_core.kernels.low_bit import can_pack, low_bit_linear, pack_weight
from std_core.kernels.shared.low_bit_format import GROUP_SIZE, PackedWeight, dequantize, quantize
from std_core.kernels.sparse_linear import kernel_layout, sparse_linear, sparsify

SIZES = st.tuples(
    st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 5).map(lambda n: GROUP_SIZE * n)
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 9), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 2**31))
def test_pytorchs_packed_product_equals_the_product_of_the_dequantized_weight(
    size: tuple[int, int], rows: int, bits: int, biased: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(*size, generator=rng)
    x = torch.randn(2, rows, size[1], generator=rng)
    bias = torch.randn(size[0], generator=rng) if biased else None
    with mock.patch.object(loader, "supports", return_value=False):
        packed = pack_weight(weight, bits)
    levels, scale = quantize(weight, bits)
    dequantized = dequantize(levels, scale, bits)
    want = F.linear(x, dequantized, bias)
    torch.testing.assert_close(low_bit_linear(x, packed, bias), want, rtol=1e-4, atol=1e-4)
    dense = PackedWeight(dequantized, packed.scale, bits, layout="dense")
    torch.testing.assert_close(low_bit_linear(x, dense, bias), want, rtol=1e-4, atol=1e-4)
    step = scale if bits == 8 else scale[..., 0]
    assert (dequantized - weight).abs().max() <= 0.501 * step.max()


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
def test_the_cpp_packed_product_equals_its_definition_and_is_near_the_full_one(
    dtype: torch.dtype, out: int, width: int, rows: int, bits: int, biased: bool, seed: int
) -> None:
    if not loader.supports(f"int{bits}", torch.empty(0, dtype=dtype)):
        pytest.skip("no compiler, or the CPU lacks the instructions")
    rng = torch.Generator().manual_seed(seed)
    weight, x, bias = (
        torch.randn(*size, generator=rng).to(dtype)
        for size in ((out, width), (rows, width), (out,))
    )
    x[:, 0] *= 50  # an outlier channel
    got = low_bit_linear(x[None], pack_weight(weight, bits), bias if biased else None)[0].double()
    padded = F.pad(weight.float(), (0, -width % BLOCK))
    levels, scale = quantize(padded, bits)
    dequantized = dequantize(levels, scale, bits)[:, :width].double()
    want = F.linear(x.bfloat16().double(), dequantized, bias.double() if biased else None)
    magnitude = (x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)) + 1
    assert ((got - want).abs() / magnitude).max() < (1e-5 if dtype == torch.float32 else 5e-3)
    full = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert ((got - full).abs() / magnitude).max() < (0.02 if bits == 8 else 0.12)


def test_nbytes_counts_levels_and_scales() -> None:
    weight = torch.randn(256, 256)
    with mock.patch.object(loader, "supports", return_value=False):
        assert pack_weight(weight, 8).nbytes == 256 * 256 + 256 * 4
        assert pack_weight(weight, 4).nbytes == 256 * 256 // 2 + 256 * 256 // GROUP_SIZE * 2 * 4
        assert not can_pack(torch.zeros(427, 192), 4) and not can_pack(torch.zeros(64, 40), 4)
        assert can_pack(torch.zeros(427, 192), 8)
    if loader.supports("int4", weight):
        assert pack_weight(weight, 8).nbytes == 256 * 256 + 256 * 4
        assert pack_weight(weight, 4).nbytes == 256 * 256 // 2 + 256 * 256 // GROUP_SIZE * 2 * 4
        assert can_pack(torch.zeros(427, 192), 4)


@settings(max_examples=40, deadline=None)
@given(
    DTYPES,
    st.integers(1, 12).map(lambda n: 32 * n),
    st.integers(1, 200),
    st.integers(1, 4),
    st.floats(0, 2.5),
    st.integers(0, 2**31),
)
def test_activations_up_to_the_threshold_count_as_zero(
    dtype: torch.dtype, out: int, width: int, rows: int, threshold: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=rng).to(dtype)
    x = torch.randn(1, rows, width, generator=rng).to(dtype)
    bias = torch.randn(out, generator=rng).to(dtype)
    # PyTorch compares in the tensor's own dtype
    threshold = float(torch.tensor(threshold, dtype=dtype))
    want = F.linear(sparsify(x, threshold).double(), weight.double(), bias.double())
    assert bool((sparsify(x, threshold) != 0).eq(x.abs() > threshold).all())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for stored in (weight, kernel_layout(weight)):
        got = sparse_linear(x, stored, bias, threshold).double()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 10)
