from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2VLConfig, Qwen3MoeConfig

from std_core.cost_model.account import (
    AcceptanceCurve,
    ModelSize,
    chances,
    speedup,
    tokens_per_round,
)
from std_core.types import Draft

LLAMA = ModelSize.of(
    LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
)
K = 1024


def test_known_answers_of_llama_3_1_8b() -> None:
    """Those that the paper gives (§3.3, table 1, §4)."""
    assert LLAMA.crossover(0.3, 0.5) / K == pytest.approx(74.3, abs=0.05)
    assert LLAMA.crossover(0.3, 0.92, rows=4) / K == pytest.approx(3.0, abs=0.05)
    assert LLAMA.bounds(128 * K, 0.3, 0.5)[1] == pytest.approx(1.60, abs=0.005)
    four_bits = ModelSize(**{**vars(LLAMA), "weight_bytes": 0.5})
    assert four_bits.crossover(0.3, 0.5) == pytest.approx(LLAMA.crossover(0.3, 0.5) / 4)


def test_a_draft_step_reads_what_it_keeps() -> None:
    whole = LLAMA.step_bytes([1000, 3000])
    assert whole == LLAMA.projection_bytes + LLAMA.head_bytes + 4000 * LLAMA.entry_bytes
    assert LLAMA.step_bytes([1000, 1000], shared=[2000]) == whole
    assert LLAMA.weights_read(Draft("full")) == LLAMA.weights_read()
    assert LLAMA.weights_read(Draft("full", weights="int8")) == LLAMA.weights_read() / 2
    half = Draft("full", depth=0.5)
    assert (
        LLAMA.step_bytes([1000], half)
        == LLAMA.projection_bytes / 2 + LLAMA.head_bytes + 500 * LLAMA.entry_bytes
    )
    sparse = Draft("full", channels=0.5)
    assert (
        LLAMA.weights_read(sparse, rows=4, union=0.92)
        == 0.92 * LLAMA.projection_bytes + LLAMA.head_bytes
    )


def test_experts_that_are_not_asked_are_not_read() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_hidden_layers=3, vocab_size=100,
    )  # fmt: skip
    account = ModelSize.of(config)
    assert account.projections == 64 * 16 * 2 * (4 + 2) + 2 * 3 * 64 * 32 + 64 * 16


def test_a_video_models_text_stack_is_what_counts() -> None:
    config = Qwen2VLConfig()
    text = config.get_text_config()
    assert (
        ModelSize.of(config).layers == text.num_hidden_layers
        and ModelSize.of(config).hidden == text.hidden_size
    )


@given(
    st.floats(0.05, 0.95),
    st.floats(0.05, 0.95),
    st.integers(1, 16),
    st.floats(0.5, 4),
    st.floats(1, 4),
)
def test_savings_are_equal_at_the_crossover(
    keep_kv: float, union: float, rows: int, weight_bytes: float, kv_bytes: float
) -> None:
    account = ModelSize(**{**vars(LLAMA), "weight_bytes": weight_bytes, "kv_bytes": kv_bytes})
    n = account.crossover(keep_kv, union, rows)
    by_projections = account.projection_bytes * (1 - union)
    assert rows * n * account.entry_bytes * (1 - keep_kv) == pytest.approx(by_projections)
    budget = 700.0
    n = account.budget_crossover(budget, union, rows)
    assert rows * (n - budget) * account.entry_bytes == pytest.approx(by_projections)


@given(st.floats(0, 1), st.integers(0, 12))
def test_expected_tokens_are_the_sum_over_what_is_accepted(acceptance: float, gamma: int) -> None:
    assert tokens_per_round(acceptance, gamma) == pytest.approx(
        sum(acceptance**i for i in range(gamma + 1))
    )


def test_a_speedup_is_tokens_over_time() -> None:
    assert speedup(1, 0, 9, 5, 5) == 1
    assert speedup(4, 4, 1, 5, 5) == pytest.approx(20 / 9)
    assert math.isclose(speedup(2.5, 2, 10, 60, 50), 125 / 80)


PLACES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(st.floats(0.01, 0.99), st.integers(0, 12), st.integers(1, 5))
def test_a_chance_that_is_the_same_everywhere_is_an_acceptance(
    a: float, gamma: int, places: int
) -> None:
    found = AcceptanceCurve((a,) * places)
    assert found.tokens(gamma) == pytest.approx(tokens_per_round(a, gamma))
    assert found.rate(gamma) == pytest.approx(a if gamma else 0.0)


@given(PLACES, st.floats(0.02, 0.98), st.integers(1, 14))
def test_chances_are_moved_by_the_same_odds_everywhere(
    seen: list[tuple[int, int]], first: float, gamma: int
) -> None:
    found = chances(*zip(*seen, strict=True))
    assert all(0 < p < 1 for p in found.by_place)
    moved = found.moved(first)
    assert moved.at(0) == pytest.approx(first)
    assert moved.moved(found.at(0)).by_place == pytest.approx(found.by_place)
    more, fewer = (moved, found) if first >= found.at(0) else (found, moved)
    assert more.tokens(gamma) >= fewer.tokens(gamma) * (1 - 1e-12)
    assert 1 < found.tokens(gamma) < gamma + 1 and found.tokens(gamma) <= found.tokens(gamma + 1)


@given(
    st.lists(st.floats(0.02, 0.98), min_size=1, max_size=6), st.integers(0, 8), st.integers(40, 80)
)
def test_rounds_are_those_of_every_way_a_text_can_go(
    places: list[float], gamma: int, tokens: int
) -> None:
    """Counted out: a round writes k tokens and leaves the rest to others."""
    found = AcceptanceCurve(tuple(places))
    reached = [math.prod(map(found.at, range(place))) for place in range(gamma + 2)]
    exactly = [reached[k - 1] - (reached[k] if k <= gamma else 0.0) for k in range(1, gamma + 2)]
    needed = [0.0]
    for left in range(1, tokens + 1):
        needed.append(1 + sum(p * needed[max(0, left - k)] for k, p in enumerate(exactly, 1)))
    assert found.rounds(tokens, gamma) == pytest.approx(needed[tokens], rel=0.05)
    assert found.rounds(0.5, gamma) >= 1 and AcceptanceCurve((0.0,)).rounds(tokens, gamma) == tokens


def test_what_is_looked_up_is_wrong_at_once_or_right_for_long() -> None:
    """Counts of a run: 201 of 347 rounds were refused at once, 58 accepted to the end; tokens per
    round of every γ are those of the run, which no single acceptance gives."""
    ends = (201, 39, 11, 14, 8, 7, 5, 4)
    reached = [58 + sum(ends[place:]) for place in range(9)]
    found = chances(reached[1:], ends)
    for gamma in range(1, 9):
        assert found.tokens(gamma) == pytest.approx(
            sum(reached[: gamma + 1]) / reached[0], rel=0.01
        )
    assert found.rate(8) > found.rate(2) + 0.1
