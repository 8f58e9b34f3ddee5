from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from std_core.cost_model import memory
from std_core.cost_model.account import ModelSize
from std_core.cost_model.memory import HELD, LongestRequest, most_slots, terms, total
from std_core.engine.prefill import OBSERVERS
from std_core.model import checkpoint
from std_core.types import Draft

QWEN = ModelSize(
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
    tower_turns=True,
    pixels=1176,
)  # Qwen2-VL-7B
LOAD = LongestRequest(context=32_768, visual=32_256, written=256)


def test_known_answers_of_qwen2_vl_7b() -> None:
    found = terms(QWEN, LOAD, 8)
    assert found["weights"] == 2 * 8_291_375_616
    assert QWEN.entry_bytes == 57_344
    assert (
        found["kv"] == 8 * (32_768 + 1024) * 57_344
    )  # in steps of 512, should a word stand before the 63 × 512
    assert found["draft_kv"] == found["draft_weights"] == 0
    assert terms(QWEN, replace(LOAD, draws="greedy"), 8)["logits"] == 8 * 152_064 * 6
    live = (3 * 3584 + 3 * 18944 + 6 * 128) * 2
    assert found["round"] == 8 * live
    assert found["prefill"] == 2048 * live + 32_256 * 3584 * 2  # a chunk, and what the tower saw
    assert (
        found["vision"] == (2048 * 4 * (17 * 1280 + 1176) + 32_256 * 3584) * 2
    )  # a piece, and what it saw
    assert found["graphs"] == found["round"] + found["logits"]
    drafted = terms(QWEN, LOAD, 8, Draft("std", gamma=5))
    assert drafted["round"] == 6 * found["round"]  # the widest step, γ + 1 tokens
    assert terms(QWEN, LOAD, 8, kind="cpu")["graphs"] == 0


def test_one_thing_at_a_time_comes_and_goes() -> None:
    found = terms(QWEN, LOAD, 8, Draft("std"))
    held = sum(found[name] for name in HELD)
    assert total(found) == held + found["vision"]
    assert found["vision"] > max(
        found["prefill"], found["round"] + found["logits"], found["growth"]
    )


def test_text_before_a_video_may_take_a_step_more() -> None:
    load = LongestRequest(context=1024 + 400, visual=1024, written=100)
    assert (
        terms(QWEN, load, 1)["kv"] == (1536 + 512) * 57_344
    )  # 1,025 and 500 entries, not 1,024 and 501
    assert (
        terms(QWEN, LongestRequest(2000, 0, 16), 1)["kv"] == (2048 + 512) * 57_344
    )  # text alone: 1,936 and 81


def test_strict_pads_steps() -> None:
    padded = terms(QWEN, replace(LOAD, strict=13), 8)
    assert padded["round"] == 13 * terms(QWEN, LOAD, 8)["round"]


def test_a_draft_has_its_own_entries_and_weights() -> None:
    kept = terms(QWEN, LOAD, 8, Draft("std", k=1024, gamma=5))
    assert kept["draft_kv"] == 8 * 2048 * 57_344  # 1,024 kept, 774 behind them
    assert terms(QWEN, LOAD, 8, Draft("ngram"))["draft_kv"] == 0
    text = LongestRequest(context=10_064, visual=0, written=16)
    assert (
        terms(QWEN, text, 1, Draft("std", keep=0.2))["draft_kv"] == 2560 * 57_344
    )  # 2,000 kept of 10,000, 86 behind
    int8, int4 = (
        terms(QWEN, LOAD, 8, Draft("full", weights=w))["draft_weights"] for w in ("int8", "int4")
    )
    assert 0.45 < int8 / (2 * (QWEN.parameters - QWEN.tower)) < 0.5 and 0.55 < int4 / int8 < 0.7
    sparse = Draft("full", channels=0.5)
    assert terms(QWEN, LOAD, 8, sparse)["draft_weights"] == 0
    assert (
        terms(QWEN, LOAD, 8, sparse, kind="cpu")["draft_weights"] == QWEN.projection_bytes
    )  # a copy
    small = replace(QWEN, layers=2, parameters=10**9, weight_bytes=2)
    pair = terms(QWEN, LOAD, 8, Draft("specvlm", k=1024, model="small"), small)
    assert pair["draft_weights"] == 2e9 and pair["draft_kv"] == kept["draft_kv"] / 14


@given(st.integers(1, 200_000), st.floats(0, 1), st.floats(17e9, 200e9), st.integers(1, 256))
def test_slots_fit_and_one_more_does_not(
    context: int, share: float, space: float, most: int
) -> None:
    load = LongestRequest(context, int(context * share), 256)
    for draft in (None, Draft("std"), Draft("std", weights="int4")):
        slots = most_slots(QWEN, load, space, most, draft=draft)
        assert 0 <= slots <= most
        if slots:
            assert total(terms(QWEN, load, slots, draft)) <= space
        if slots < most:
            assert total(terms(QWEN, load, slots + 1, draft)) > space


def test_a_prompts_end_is_where_prefill_cuts_it() -> None:
    assert memory.TAIL == checkpoint.TAIL and memory.ASKED == OBSERVERS
