from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from std_core.cost_model.crossover import crossover_context, speedup, speedup_bounds
from std_core.cost_model.model_size import ModelSize

LLAMA = ModelSize(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
)
K = 1024


def test_published_figures_of_llama_3_1_8b() -> None:
    """Crossover §3.3, table 1, and §4.4."""
    assert crossover_context(LLAMA, 0.3, 0.5) / K == pytest.approx(74.3, abs=0.05)
    assert crossover_context(LLAMA, 0.3, 0.92, rows=4) / K == pytest.approx(3.0, abs=0.05)
    assert speedup_bounds(LLAMA, 128 * K, 0.3, 0.5).kv == pytest.approx(1.60, abs=0.005)
    four_bits = crossover_context(replace(LLAMA, weight_bytes=0.5), 0.3, 0.5)
    assert four_bits == pytest.approx(crossover_context(LLAMA, 0.3, 0.5) / 4)


@given(
    st.floats(0.05, 0.95),
    st.floats(0.05, 0.95),
    st.integers(1, 16),
    st.floats(0.5, 4),
    st.floats(1, 4),
)
def test_both_kinds_of_sparsity_save_the_same_bytes_at_the_crossover(
    keep_kv: float, union_fraction: float, rows: int, weight_bytes: float, kv_bytes: float
) -> None:
    size = replace(LLAMA, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    context = crossover_context(size, keep_kv, union_fraction, rows)
    saved_weights = size.projection_bytes * (1 - union_fraction)
    assert rows * context * size.entry_bytes * (1 - keep_kv) == pytest.approx(saved_weights)


def test_speedup_is_tokens_per_round_over_the_rounds_relative_cost() -> None:
    assert speedup(1, 0, 9, 5, 5) == 1
    assert speedup(4, 4, 1, 5, 5) == pytest.approx(20 / 9)
    assert math.isclose(speedup(2.5, 2, 10, 60, 50), 125 / 80)
