from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2VLConfig

from std_core.cost_model.account import ModelSize
from std_core.cost_model.device_specs import (
    NAMED,
    PUBLISHED,
    device_at_hand,
    published,
    published_name,
    unmeasured,
)
from std_core.cost_model.profile import (
    VERSION,
    Accepted,
    CalibratedDraft,
    Cost,
    Device,
    Profile,
    Retrieved,
    Step,
    from_json,
    non_negative,
    to_json,
)
from std_core.model.checkpoint import whole_account
from std_core.types import Draft

ACCOUNT = ModelSize(
    2,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    parameters=1000,
)
PROFILE = Profile(
    Device("d", kind="cpu", bandwidth=1e10, memory=1e9, flops=1e12),
    model="m",
    dtype="float32",
    account=ACCOUNT,
    full=Cost(1.5, constant=1e-3, token=2e-4, entry=1e-7, residual=(0.01, 0.1)),
    prefill=(0.1, 1e-4, 1e-9),
    vision=1e-5,
    drafts=(
        CalibratedDraft(
            Draft("std"),
            cost=Cost(),
            once=(1e-3, 1e-6),
            acceptance=(
                Accepted(512, "caption", (9,), (1,)),
                Accepted(8192, "caption", (6,), (4,)),
            ),
            retrieved=(Retrieved(512, 32, 30, 29), Retrieved(8192, 32, 28, 12)),
        ),
        CalibratedDraft(
            Draft("specvlm", model="x"),
            cost=Cost(),
            once=(0, 0),
            acceptance=(
                Accepted(512, kind="question", accepted=(1, 0), refused=(1, 1), drawn=True),
            ),
            pair=replace(ACCOUNT, layers=1),
        ),
    ),
    union=((0.5, 1, 0.5), (0.5, 8, 0.95)),
    lengths=(("caption", 90.0),),
)
positive = st.floats(0.1, 10)


@given(positive, positive, positive, positive)
def test_a_cost_is_found_again(scale: float, constant: float, token: float, entry: float) -> None:
    true = Cost(scale, constant * 1e-3, token * 1e-4, entry * 1e-8)
    grid = [(b, t, n) for b in (0.01, 0.02, 0.05) for t in (1, 8, 48) for n in (1e3, 1e5)]
    found = Cost.fit([Step(*step, true.seconds(*step)) for step in grid])
    assert found.residual[1] < 1e-3
    for step in grid:
        assert found.seconds(*step) == pytest.approx(true.seconds(*step), rel=1e-3)


@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=12))
def test_weights_are_never_negative(rows: list[tuple[float, float, float]]) -> None:
    weights, (median, high) = non_negative(
        [(1.0, *row[:2]) for row in rows], [row[2] for row in rows]
    )
    assert all(w >= 0 for w in weights) and 0 <= median <= high + 1e-12


def test_a_column_of_zeros_gets_no_weight() -> None:
    weights, _ = non_negative([(0.0, 1.0), (0.0, 2.0)], [3.0, 6.0])
    assert weights == pytest.approx((0.0, 3.0))


def test_a_profile_is_its_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(PROFILE)))) == PROFILE


def test_a_draft_has_to_find_nearly_all_that_its_model_finds() -> None:
    assert Retrieved(512, 32, 30, 27).enough and not Retrieved(512, 32, 30, 26).enough
    assert not Retrieved(
        512, 32, 15, 15
    ).enough  # a model that finds little tells nothing of its draft


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"account": None}, "no device profile"),
        ({"full": {"x": 1}}, "no device"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_json(to_json(PROFILE) | change)
    with pytest.raises(ValueError, match="no device profile"):
        from_json([1])


def test_acceptance_is_of_what_was_measured_near_by_and_of_its_kind() -> None:
    std, pair = PROFILE.drafts
    assert std.accepts(512, "caption").by_place == pytest.approx(
        (9.5 / 11,), rel=1e-3
    )  # the other is 4 octaves away
    assert std.accepts(9000, "caption").by_place == pytest.approx((6.5 / 11,), rel=1e-3)
    assert std.accepts(2048, "caption").by_place == pytest.approx(
        (15.5 / 21,)
    )  # between the two: both alike
    assert std.accepts(700, "question") == std.accepts(700, "caption")  # for want of its own
    assert std.accepts(700, "caption", drawn=True) == std.accepts(700, "caption")
    assert pair.accepts(1, "question", drawn=True).by_place == pytest.approx((0.5, 0.25))


def test_unions_are_of_the_nearest_batch() -> None:
    assert PROFILE.union_of(Draft("full", channels=0.5), 6) == 0.95
    assert (
        PROFILE.union_of(Draft("full", channels=0.3), 6) is None
        and PROFILE.union_of(Draft("std"), 6) is None
    )


def test_devices_are_known_by_their_drivers_names() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "A100-80G",
        "NVIDIA A100-PCIE-40GB": "A100-40G",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "Tesla T4": None,
    }
    assert {name: published_name(name) for name in names} == names
    assert set(NAMED) <= set(PUBLISHED)


def test_without_a_measurement_a_gpu_has_a_choice_and_a_cpu_none() -> None:
    gpu = unmeasured(published("A100-80G"), ACCOUNT, "m", "bfloat16")
    assert gpu.drafts and not gpu.measured and gpu.spread[0] < 1 < gpu.spread[1]
    cpu = unmeasured(device_at_hand("cpu"), ACCOUNT, "m", "bfloat16")
    assert not cpu.drafts and cpu.device.memory > 0


def test_a_model_is_counted_whole_without_being_loaded() -> None:
    config = Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
        text_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 100,
        },
        tie_word_embeddings=True,
    )  # fmt: skip
    account = whole_account(config, 2, 2)
    assert (
        account.tower_width == 32
        and account.patches == 4
        and 0 < account.tower < account.parameters
    )
    assert account.parameters - account.tower > account.layers * account.projections
