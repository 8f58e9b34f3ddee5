"""The suite `decode` at a small size: what it counts is right, whatever the times are."""

from __future__ import annotations

import statistics

import pytest
import torch

from jobs.suites.decode import questions, suite
from jobs.suites.shared import paired_timing
from pipeline.records import UsageError


@pytest.fixture(scope="module")
def figures() -> dict:
    words = [
        "--model",
        "demo",
        "--batches",
        "1,2",
        "--contexts",
        "256",
        "--tokens",
        "40",
        "--pairs",
        "2",
        "--threads",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "read_bandwidth", lambda: paired_timing.read_bandwidth(0.01, 2))
        patch.setattr(questions, "VIDEOS", 2)
        return suite.run(words)


def test_every_draft_writes_what_the_dense_loops_write(figures: dict) -> None:
    assert {(row["batch"], row["policy"]) for row in figures["rows"]} == {
        (batch, name)
        for batch in (1, 2)
        for name in ("std_1024", "std_512", "std_512_int8", "ngram", "refresh_1024")
    }
    for row in figures["rows"]:
        assert row["identical"] == row["rows"] == row["batch"]
        assert row["diverged"] == 0 or "cpp" not in figures["dense_attention"]
        assert row["dense_ms"] > 0 and row["verify_ms"] > 0 and row["verify_t8_ms"] > 0
        assert (
            row["speedup_low"] <= row["speedup"]
            and row["vs_hf_generate"] > 0
            and row["speedup_end_to_end"] > 0
        )
        assert (row["draft_ms"] > 0) == (row["draft_bytes"] > 0) or row["policy"] == "ngram"
        assert row["bound"] is None, "no bound is stated where a step reads less than caches hold"
        assert row["vs_hf_lookup"] is None, (
            "Hugging Face's prompt lookup drafts placeholders of videos and fails"
        )


def test_a_draft_that_sees_everything_is_accepted_whole(figures: dict) -> None:
    whole = [
        row for row in figures["rows"] if row["policy"] == "std_1024"
    ]  # K is more than there is
    assert all(row["accepted_per_round"] == pytest.approx(row["gamma"], abs=0.4) for row in whole)


def test_questions_on_shared_videos_are_answered_alike(figures: dict) -> None:
    asked = figures["questions"]
    assert (
        asked["questions"] == 16 and asked["same_answers"] >= 15
    )  # bfloat16: two near logits may change places


def test_a_ratio_is_of_pairs_and_its_bound_below_it() -> None:
    over = [2.0, 4.0, 6.0, 9.0]
    under = [1.0, 2.0, 2.0, 3.0]
    middle, low = paired_timing.ratio(over, under)
    assert middle == statistics.median([2, 2, 3, 3]) and 2 <= low <= middle


def test_random_weights_of_a_real_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        suite.decode_shapes.SHAPES,
        "small_shape",
        (suite.decode_shapes.Qwen3Config, (64, 96, 2, 4, 2, 128)),
    )
    monkeypatch.setattr(suite, "read_bandwidth", lambda: 1.0)
    words = "--model small_shape --batches 1,2 --contexts 100 --tokens 40 --pairs 2 --threads 1"
    found = suite.run(words.split())
    assert (
        found["random_weights"]
        and found["questions"] is None
        and torch.get_default_dtype() == torch.float32
    )
    for row in found["rows"]:
        assert row["identical"] == row["rows"] and (row["vs_hf_lookup"] is None) == (
            row["batch"] > 1
        )
    without = suite.run([*words.replace("1,2", "1").split(), "--hugging-face", "false"])
    assert all(
        row["hf_prefill_ms"] is None and "vs_hf_generate" not in row for row in without["rows"]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batches 1,x", "--batches is '1,x'"),
        ("--batches 1 --tokens 20", "pairs need at least"),
        ("--device cuda", "has none"),
    ],
)
def test_flags_that_make_no_sense(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "read_bandwidth", lambda: 1.0)
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=said):
        suite.run(["--model", "demo", "--contexts", "200", "--threads", "1", *words.split()])
