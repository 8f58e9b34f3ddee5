from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from std_core.cost_model.memory import (
    PERMANENT,
    LongestRequest,
    max_slots,
    memory_breakdown,
    peak_memory,
)
from std_core.cost_model.model_size import ModelSize
from std_core.types import Draft

QWEN2_VL_7B = ModelSize(
    28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152064,
    parameters=8_291_375_616,
    tower=675_759_104,
    tower_width=1280,
    tower_mlp=3 * 5120,
    tower_rope=True,
    pixels=1176,
)
ENTRY_BYTES = 57_344
LONGEST = LongestRequest(context=32_768, visual=32_256, max_tokens=256)


def test_known_figures_of_qwen2_vl_7b() -> None:
    found = memory_breakdown(QWEN2_VL_7B, LONGEST, 8)
    assert found["weights"] == 2 * 8_291_375_616
    assert QWEN2_VL_7B.entry_bytes == ENTRY_BYTES
    # the prefix is 63 × 512 entries: one token of text before the video takes another 512
    assert found["kv"] == 8 * (32_768 + 1024) * ENTRY_BYTES
    assert found["draft_kv"] == found["draft_weights"] == 0
    greedy = memory_breakdown(QWEN2_VL_7B, replace(LONGEST, sampling="greedy"), 8)
    assert greedy["logits"] == 8 * 152_064 * 6
    activations = (3 * 3584 + 3 * 18944 + 6 * 128) * 2
    assert found["round"] == 8 * activations
    features = 32_256 * 3584
    assert found["prefill"] == 2048 * activations + features * 2
    assert found["vision"] == (2048 * 4 * (17 * 1280 + 1176) + features) * 2
    assert found["graphs"] == found["round"] + found["logits"]
    drafted = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("std", gamma=5))
    assert drafted["round"] == 6 * found["round"]  # the widest step has γ + 1 tokens per row
    on_cpu = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, device_kind="cpu")
    assert on_cpu["graphs"] == 0


def test_the_peak_has_the_largest_of_what_alternates() -> None:
    found = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("std"))
    permanent = sum(found[name] for name in PERMANENT)
    assert peak_memory(found) == permanent + found["vision"]
    others = found["prefill"], found["round"] + found["logits"], found["growth"]
    assert found["vision"] > max(others)


def test_text_before_a_video_may_take_one_more_split() -> None:
    video = LongestRequest(context=1024 + 400, visual=1024, max_tokens=100)
    # 1,025 and 500 entries take more splits than 1,024 and 501
    assert memory_breakdown(QWEN2_VL_7B, video, 1)["kv"] == (1536 + 512) * ENTRY_BYTES
    text = LongestRequest(context=2000, visual=0, max_tokens=16)
    # 1,936 and 81
    assert memory_breakdown(QWEN2_VL_7B, text, 1)["kv"] == (2048 + 512) * ENTRY_BYTES


def test_strict_pads_the_steps() -> None:
    padded = memory_breakdown(QWEN2_VL_7B, replace(LONGEST, strict_width=13), 8)
    assert padded["round"] == 13 * memory_breakdown(QWEN2_VL_7B, LONGEST, 8)["round"]


def test_a_draft_has_its_own_entries() -> None:
    selection = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("std", k=1024, gamma=5))
    # 1,024 kept, 774 behind them
    assert selection["draft_kv"] == 8 * 2048 * ENTRY_BYTES
    assert memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("ngram"))["draft_kv"] == 0
    text = LongestRequest(context=10_064, visual=0, max_tokens=16)
    # 2,000 kept of 10,000, 86 behind them
    on_text = memory_breakdown(QWEN2_VL_7B, text, 1, Draft("std", keep=0.2))
    assert on_text["draft_kv"] == 2560 * ENTRY_BYTES


def test_a_draft_has_its_own_copy_of_the_weights() -> None:
    int8, int4 = (
        memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("full", weights=weights))["draft_weights"]
        for weights in ("int8", "int4")
    )
    text_stack = 2 * (QWEN2_VL_7B.parameters - QWEN2_VL_7B.tower)
    assert 0.45 < int8 / text_stack < 0.5
    assert 0.55 < int4 / int8 < 0.7
    sparse = Draft("full", channels=0.5)
    assert memory_breakdown(QWEN2_VL_7B, LONGEST, 8, sparse)["draft_weights"] == 0
    on_cpu = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, sparse, device_kind="cpu")
    assert on_cpu["draft_weights"] == QWEN2_VL_7B.projection_bytes


def test_a_second_model_has_its_own_weights_and_cache() -> None:
    small = replace(QWEN2_VL_7B, layers=2, parameters=10**9, weight_bytes=2)
    pair = Draft("specvlm", k=1024, model="small")
    found = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, pair, small)
    assert found["draft_weights"] == 2e9
    alone = memory_breakdown(QWEN2_VL_7B, LONGEST, 8, Draft("std", k=1024, gamma=5))
    assert found["draft_kv"] == alone["draft_kv"] / 14


@given(st.integers(1, 200_000), st.floats(0, 1), st.floats(17e9, 200e9), st.integers(1, 256))
def test_the_most_slots_fit_and_one_more_does_not(
    context: int, share: float, memory: float, limit: int
) -> None:
    longest = LongestRequest(context, int(context * share), 256)
    for draft in (None, Draft("std"), Draft("std", weights="int4")):
        slots = max_slots(QWEN2_VL_7B, longest, memory, limit, draft=draft)
        assert 0 <= slots <= limit
        if slots:
            assert peak_memory(memory_breakdown(QWEN2_VL_7B, longest, slots, draft)) <= memory
        if slots < limit:
            assert peak_memory(memory_breakdown(QWEN2_VL_7B, longest, slots + 1, draft)) > memory
