from __future__ import annotations

import json
from typing import Any

import pytest

from std_core.cost_model.profile import PROFILE_VERSION, Profile
from std_core.cost_model.profile_json import from_json, to_json


def test_a_profile_survives_the_way_through_json(profile: Profile) -> None:
    assert from_json(json.loads(json.dumps(to_json(profile)))) == profile


def test_keys_of_version_4(profile: Profile) -> None:
    """Files of this version exist, so its keys stay whatever the fields are called."""
    content: dict[str, Any] = json.loads(json.dumps(to_json(profile)))
    assert list(content) == [
        "device", "model", "dtype", "account", "full", "prefill", "vision", "drafts",
        "union", "lengths", "spread", "noise", "measured", "version",
    ]  # fmt: skip
    assert list(content["account"]) == [
        "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary",
        "experts", "router", "weight_bytes", "kv_bytes", "parameters", "tower", "tower_width",
        "patches", "tower_mlp",
        "tower_turns", "tower_places", "pixels", "levels",
    ]  # fmt: skip
    assert content["full"] == {
        "scale": 1.5, "constant": 1e-3, "token": 2e-4, "entry": 1e-7, "residual": [0.01, 0.1],
    }  # fmt: skip
    assert content["prefill"] == [0.1, 1e-4, 1e-9]
    assert content["union"] == [[0.5, 1, 0.5], [0.5, 8, 0.95]]
    assert content["lengths"] == [["caption", 90.0]] and content["spread"] == [1.0, 1.0]
    std, pair = content["drafts"]
    assert list(std) == [
        "draft", "cost", "once", "acceptance", "pair", "retrieved", "keep_agreements",
        "rounds_keep",
    ]  # fmt: skip
    assert std["keep_agreements"] == [
        {"keep": 0.1, "context": 512, "agreed": 60, "tokens": 100},
        {"keep": 0.2, "context": 512, "agreed": 90, "tokens": 100},
    ]
    assert std["once"] == [1e-3, 1e-6] and std["pair"] is None and pair["pair"]["layers"] == 1
    assert std["retrieved"][0] == {"context": 512, "asked": 32, "dense": 30, "sparse": 29}
    assert pair["acceptance"] == [
        {"context": 512, "kind": "question", "accepted": [1, 0], "refused": [1, 1], "drawn": True}
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": PROFILE_VERSION + 1}, "version"),
        ({"account": None}, "no device profile"),
        ({"full": {"x": 1}}, "no device"),
    ],
)
def test_other_content_is_refused(
    change: dict[str, object], message: str, profile: Profile
) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(to_json(profile) | change)
    with pytest.raises(ValueError, match="no device profile"):
        from_json([1])
