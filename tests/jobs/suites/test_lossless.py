"""The suite `lossless` at a small size, and the sample of its grid."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import benchmark
from jobs.suites import lossless
from pipeline.records import UsageError
from std_core.engine import batch


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 100))
def test_every_pair_of_values_occurs_in_some_case(sizes: list[int], seed: int) -> None:
    grid = {f"key{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    cases = lossless.pairwise_cases(grid, seed)
    assert cases == lossless.pairwise_cases(grid, seed)
    for a, b in itertools.combinations(grid, 2):
        assert {(c[a], c[b]) for c in cases} == set(itertools.product(grid[a], grid[b]))


def run_suite(capsys: pytest.CaptureFixture[str], argv: str) -> dict[str, Any]:
    assert benchmark.main(["--suite", "lossless", "--threads", "1", *argv.split()]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_texts_are_identical_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_suite(capsys, "--model llama --model qwen3_vl --cases 6 --requests 4")
    assert found["cases"] == 6 and found["wrong"] == []
    assert found["identical"] == found["total"] == 24
    assert sum(p["total"] for p in found["policies"].values()) == 24
    bfloat16 = found["bf16"]
    rows = 2 * 4 * len(lossless.BF16_DRAFTS)
    assert bfloat16["rows"] == bfloat16["strict"]["rows"] == rows
    assert bfloat16["strict"]["diverged"] == 0 and 0 <= bfloat16["rate"] <= 1


def test_the_suite_detects_a_wrong_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if one drafted token too many were accepted."""
    decode_round = batch.decode_round

    def faulty_round(*args: Any) -> Any:
        done = decode_round(*args)
        done.tokens[:, 0] = 1
        return done

    monkeypatch.setattr(batch, "decode_round", faulty_round)
    monkeypatch.setattr(lossless, "BF16_DRAFTS", lossless.BF16_DRAFTS[:1])
    found = run_suite(capsys, "--model llama --cases 2 --requests 3")
    assert found["identical"] < found["total"]
    different = sum(case["total"] - case["identical"] for case in found["wrong"])
    assert different == found["total"] - found["identical"]


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(UsageError, match="'nobody' is none of demo"):
        lossless.run(["--model", "nobody"])
