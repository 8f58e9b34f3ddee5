"""Projections, SwiGLU and RMS norm on a CPU against their definitions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from std_core.kernels.cpu import loader
from std_core.kernels.linear import linear, rms_norm, swiglu
from std_core.model.cpu_modules import CpuGatedMLP, CpuLinear, CpuRMSNorm, use_cpu_kernels

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.integers(1, 90).map(lambda n: 2 * n)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}


@settings(max_examples=60, deadline=None)
@given(DTYPES, st.integers(1, 140), SIZES, st.integers(1, 90), st.booleans(), st.integers(0, 2**31))
def test_linear_and_swiglu_equal_their_definitions(
    dtype: torch.dtype, rows: int, width: int, out: int, biased: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, weight, up, bias = (
        torch.randn(*shape, generator=rng).to(dtype)
        for shape in ((rows, width), (out, width), (out, width), (out,))
    )
    want = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(
        linear(x, weight, bias if biased else None).double(), want, **tolerance(dtype)
    )
    both = F.silu(F.linear(x.double(), weight.double())) * F.linear(x.double(), up.double())
    got = swiglu(x, weight, up).double()
    assert (got - both).abs().max() <= 2e-2 * (1 + both.abs().max())


def test_other_layouts_and_dtypes_of_the_weight_fall_back_to_pytorch() -> None:
    x = torch.randn(3, 8)
    transposed = torch.randn(8, 5).T
    up = torch.randn(5, 8)
    torch.testing.assert_close(linear(x, transposed), x @ transposed.T)
    torch.testing.assert_close(swiglu(x, up, transposed), F.silu(x @ up.T) * (x @ transposed.T))
    half = torch.randn(8, dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x, half, 1e-6), F.rms_norm(x, (8,), half.float(), 1e-6))


@settings(max_examples=30, deadline=None)
@given(DTYPES, st.integers(1, 100), st.integers(1, 300), st.integers(0, 2**31))
def test_rms_norm_equals_its_definition(
    dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=rng).to(dtype)
    weight = torch.randn(width, generator=rng).to(dtype)
    want = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), want, rtol=1e-2, atol=2e-3)


@settings(max_examples=40, deadline=None)
@given(DTYPES, st.integers(1, 128), st.data())
def test_a_row_gets_the_same_bits_in_any_batch(
    dtype: torch.dtype, rows: int, data: st.DataObject
) -> None:
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x, weight, up = (torch.randn(n, 100, generator=rng).to(dtype) for n in (rows, 50, 50))
    if not loader.supports("linear", x):
        pytest.skip("no compiler, or the CPU lacks the instructions")
    row = data.draw(st.integers(0, rows - 1))
    for product in (lambda x: linear(x, weight), lambda x: swiglu(x, weight, up)):
        assert torch.equal(product(x)[row], product(x[row : row + 1])[0])
    norm_weight = x[0].clone()
    whole = rms_norm(x, norm_weight, 1e-6)
    assert torch.equal(whole[row], rms_norm(x[row : row + 1], norm_weight, 1e-6)[0])


def test_fast_modules_share_the_models_parameters_and_results() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=96)
    torch.manual_seed(0)
    tree = nn.Sequential(LlamaRMSNorm(64), LlamaMLP(config), nn.Linear(64, 30))
    other = use_cpu_kernels(tree)
    if other is tree:
        pytest.skip("no compiler, or the CPU lacks the instructions")
    assert [type(m) for m in other] == [CpuRMSNorm, CpuGatedMLP, CpuLinear] and type(
        tree[2]
    ) is nn.Linear
    assert {id(p) for p in other.parameters()} == {id(p) for p in tree.parameters()}
    assert {n for n, _ in other.named_parameters()} == {n for n, _ in tree.named_parameters()}
    x = torch.randn(5, 64)
    torch.testing.assert_close(other(x), tree(x))
    hooked = []
    other[1].up_proj.register_forward_pre_hook(lambda _, args: hooked.append(args))
    torch.testing.assert_close(other(x), tree(x))
    assert hooked, "the fused MLP must run a projection's forward hooks"


def test_pytorch_is_used_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And without a library from an earlier run."""
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with mock.patch.object(loader, "_kernels", loader._kernels.__wrapped__):
        assert not loader.supports("linear", torch.empty(1))
        tree = nn.Sequential(nn.Linear(4, 4))
        assert use_cpu_kernels(tree) is tree
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        assert "PyTorch's operations are used" in caplog.text
