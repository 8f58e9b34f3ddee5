from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from std_core.account import Account
from std_core.memory import Load, most_slots, terms
from std_core.types import Draft

QWEN = Account(
    28, 3584, 18944, 28, 4, 128, 152064, parameters=8_291_375_616, tower=675_759_104, tower_width=1280
)  # Qwen2-VL-7B
LOAD = Load(context=32_768, visual=32_256, written=256)


def test_known_answers_of_qwen2_vl_7b() -> None:
    found = terms(QWEN, LOAD, 8)
    assert found["weights"] == 2 * 8_291_375_616
    assert QWEN.entry_bytes == 57_344
    assert found["kv"] == 8 * (32_256 + 1024) * 57_344  # in steps of 512: 63 × 512 and 769 entries behind the visual
    assert found["draft_kv"] == found["draft_weights"] == 0
    assert found["logits"] == 8 * 152_064 * 4 * 3
    assert found["round"] == 8 * (4 * 3584 + 3 * 18944 + 2 * 28 * 128) * 2
    drafted = terms(QWEN, LOAD, 8, Draft("std", gamma=5))
    assert all(drafted[name] == 6 * found[name] for name in ("round", "logits"))  # the widest step, γ + 1 tokens


def test_a_draft_has_its_own_entries_and_weights() -> None:
    kept = terms(QWEN, LOAD, 8, Draft("std", k=1024, gamma=5))
    assert kept["draft_kv"] == 8 * 2048 * 57_344  # 1,024 kept, 774 behind them
    assert terms(QWEN, LOAD, 8, Draft("ngram"))["draft_kv"] == 0
    int8, int4 = (terms(QWEN, LOAD, 8, Draft("full", weights=w))["draft_weights"] for w in ("int8", "int4"))
    assert 0.45 < int8 / (2 * (QWEN.parameters - QWEN.tower)) < 0.5 and 0.55 < int4 / int8 < 0.7
    small = replace(QWEN, layers=2, parameters=10**9, weight_bytes=2)
    pair = terms(QWEN, LOAD, 8, Draft("specvlm", k=1024, model="small"), small)
    assert pair["draft_weights"] == 2e9 and pair["draft_kv"] == kept["draft_kv"] / 14


@given(st.integers(1, 200_000), st.floats(0, 1), st.floats(17e9, 200e9), st.integers(1, 256))
def test_slots_fit_and_one_more_does_not(context: int, share: float, memory: float, most: int) -> None:
    load = Load(context, int(context * share), 256)
    for draft in (None, Draft("std"), Draft("std", weights="int4")):
        slots = most_slots(QWEN, load, memory, most, draft)
        assert 0 <= slots <= most
        if slots:
            assert sum(terms(QWEN, load, slots, draft).values()) <= memory
        if slots < most:
            assert sum(terms(QWEN, load, slots + 1, draft).values()) > memory
