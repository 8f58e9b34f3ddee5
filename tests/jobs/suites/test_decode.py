"""The suite `decode` at a small size: its counts are right, whatever the times are."""

from __future__ import annotations

import statistics

import pytest
import torch

from jobs.suites.decode import questions, suite
from jobs.suites.shared.random_models import TextSize
from jobs.suites.shared.timing import paired_ratio, read_bandwidth
from pipeline.records import UsageError


@pytest.fixture(scope="module")
def figures() -> dict:
    argv = "--model demo --batches 1,2 --contexts 256 --tokens 40 --pairs 2 --threads 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "read_bandwidth", lambda: read_bandwidth(1e7, times=2))
        patch.setattr(questions, "VIDEOS", 2)
        return suite.run(argv.split())


def test_every_draft_writes_the_dense_loops_tokens(figures: dict) -> None:
    assert {(row["batch"], row["policy"]) for row in figures["rows"]} == {
        (batch, name)
        for batch in (1, 2)
        for name in ("std_1024", "std_512", "std_512_int8", "ngram", "refresh_1024")
    }
    for row in figures["rows"]:
        assert row["identical"] == row["rows"] == row["batch"]
        assert row["diverged"] == 0 or "cpp" not in figures["dense_attention"]
        assert row["dense_ms"] > 0 and row["verify_ms"] > 0 and row["verify_t8_ms"] > 0
        assert row["speedup_low"] <= row["speedup"]
        assert row["vs_hf_generate"] > 0 and row["speedup_end_to_end"] > 0
        assert (row["draft_ms"] > 0) == (row["draft_bytes"] > 0) or row["policy"] == "ngram"
        assert row["bound"] is None, "a step whose reads the caches serve has no bound"
        assert row["vs_hf_lookup"] is None, "Hugging Face's prompt lookup fails on videos"


def test_a_draft_that_keeps_all_entries_is_always_accepted(figures: dict) -> None:
    # K exceeds the context
    rows = [row for row in figures["rows"] if row["policy"] == "std_1024"]
    assert all(row["accepted_per_round"] == pytest.approx(row["gamma"], abs=0.4) for row in rows)


def test_answers_on_shared_videos_are_those_of_generate(figures: dict) -> None:
    asked = figures["questions"]
    assert asked["questions"] == 16
    assert asked["same_answers"] >= 15  # bfloat16: two near logits may change places


def test_a_ratio_is_the_median_of_pairs_above_its_bound() -> None:
    ratio = paired_ratio([2.0, 4.0, 6.0, 9.0], [1.0, 2.0, 2.0, 3.0])
    assert ratio.median == statistics.median([2, 2, 3, 3])
    assert 2 <= ratio.lower_bound <= ratio.median


def test_a_real_shape_with_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    size = TextSize(64, 96, layers=2, heads=4, kv_heads=2, vocabulary=128, head_dim=128, tied=True)
    monkeypatch.setitem(suite.shapes.SHAPES, "small_shape", ("qwen3", size))
    monkeypatch.setattr(suite, "read_bandwidth", lambda: 1e9)
    argv = "--model small_shape --batches 1,2 --contexts 100 --tokens 40 --pairs 2 --threads 1"
    found = suite.run(argv.split())
    assert found["random_weights"] and found["questions"] is None
    assert torch.get_default_dtype() == torch.float32
    for row in found["rows"]:
        assert row["identical"] == row["rows"]
        assert (row["vs_hf_lookup"] is None) == (row["batch"] > 1)
    one_row = argv.replace("1,2", "1")
    without = suite.run([*one_row.split(), "--hugging-face", "false"])
    for row in without["rows"]:
        assert row["hf_prefill_ms"] is None and "vs_hf_generate" not in row


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--batches 1,x", "--batches is '1,x'"),
        ("--batches 1 --tokens 20", "pairs need at least"),
        ("--device cuda", "has none"),
    ],
)
def test_impossible_flags_are_errors(
    argv: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "read_bandwidth", lambda: 1e9)
    if torch.cuda.is_available() and "cuda" in argv:
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match=message):
        suite.run(["--model", "demo", "--contexts", "200", "--threads", "1", *argv.split()])
