"""Calibration of a tiny model over a tiny grid, and plans that are made with what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import calibrate
from jobs.calibration import measure
from pipeline.job import main
from pipeline.plan.profile_file import read_profile
from pipeline.records import UsageError
from pipeline.video import frames
from std_core.cost_model.device_specs import QUOTED_DEVICES
from std_core.cost_model.profile import PROFILE_VERSION, PROMPT_KINDS

SMALL = [
    "--contexts",
    "64,200",
    "--rows",
    "1,2",
    "--tokens",
    "3",
    "--pairs",
    "1",
    "--threads",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def calibrated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the tiny model."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure.BANDWIDTH_GIGABYTES, "cpu", 0.02)
        words = [
            "--model",
            str(tiny_model),
            "--output",
            str(path),
            "--drafts",
            "std,int8,ngram,teal",
        ]
        assert calibrate.main([*words, *SMALL]) == 0
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """A plan's text and its JSON; of one that is refused the sentence."""
    assert main(list(words), "plan.py", plan_only=True) == code
    captured = capsys.readouterr()
    if code:
        return captured.err
    *text, last = captured.out.splitlines()
    return "\n".join(text), json.loads(last)


def test_a_profile_holds_every_draft_and_cost(calibrated: Path) -> None:
    profile = read_profile(str(calibrated))
    assert profile.measured and profile.device.bandwidth > 0 and profile.device.flops > 0
    assert [(t.draft.policy, t.draft.weights) for t in profile.drafts] == [
        ("std", "full"), ("std", "int8"), ("ngram", "full"), ("full", "full"),
    ]  # fmt: skip
    for tried in profile.drafts:
        kinds = [
            (context, kind, drawn)
            for context in (0, 1)
            for kind in PROMPT_KINDS
            for drawn in (False, True)
        ]
        assert [(int(a.context > 250), a.kind, a.sampled) for a in tried.acceptance] == kinds
        assert all(
            0 < len(a.accepted) <= tried.draft.gamma and a.rejected[0] >= 0
            for a in tried.acceptance
        )
        assert tried.latency.seconds(1e-4, 1, 100) > 0
    assert (
        profile.latency.seconds(1e-4, 8, 1000) > 0
        and profile.prefill_s(100) > 0
        and profile.vision_s_per_token > 0
    )
    assert {u.rows for u in profile.union_fractions} == {1, 2, 4, 8}
    assert profile.spread.low <= 1 <= profile.spread.high and profile.sampling_s_per_token >= 0


def test_a_plan_weighs_the_drafts_of_a_profile(
    calibrated: Path,
    tiny_model: Path,
    archive: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []
    for name in ("decode", "take_worker"):  # whatever decodes goes through a worker
        monkeypatch.setattr(frames, name, lambda *_: decoded.append("a frame"))
    words = ("--input", str(archive), "--model", str(tiny_model), "--profile", str(calibrated))
    text, found = plan(capsys, *words, "--price-per-hour", "2")
    assert not decoded
    assert found["figures"].startswith("times as measured on")
    (bucket,) = [b for b in found["buckets"].values() if b["requests"] == 6] or [None]
    assert bucket is not None
    assert {way["draft"].split(" ")[0] for way in bucket["candidates"]} == {
        "dense",
        "std",
        "ngram",
        "full",
    }
    assert bucket["candidates"][0]["draft"] in bucket["drafts"] and bucket["crossover"] > 0
    assert (
        sum(found["shares"].values()) == pytest.approx(1, abs=1e-3)
        and min(found["seconds"].values()) > 0
    )
    low, expected, high = found["engine_hours"]
    assert low <= expected <= high and len(found["cost"]) == 3
    assert set(found["engine_hours_elsewhere"]) == set(QUOTED_DEVICES)
    assert "s/request" in text and all(name in text for name in QUOTED_DEVICES)


def test_a_named_draft_is_planned_with(
    calibrated: Path, tiny_model: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--input",
        str(archive),
        "--model",
        str(tiny_model),
        "--profile",
        str(calibrated),
        "--draft",
        "int8",
    )
    _, found = plan(capsys, *words)
    assert {wave["draft"] for wave in found["waves"]} == {"std 0.2 int8 γ5"}
    _, found = plan(capsys, *words[:-2], "--mode", "dense")
    assert {wave["draft"] for wave in found["waves"]} == {"dense"}


def test_without_a_profile_the_plan_says_so(
    tiny_model: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, found = plan(capsys, "--input", str(archive), "--model", str(tiny_model))
    assert "--profile has measured ones" in found["figures"] and found["figures"] in text
    assert {wave["draft"] for wave in found["waves"]} == {"dense"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p | {"version": PROFILE_VERSION + 1}, f"version {PROFILE_VERSION + 1}"),
        (lambda p: p | {"model": "another"}, "of model another"),
        (lambda p: p | {"dtype": "bfloat16"}, "of bfloat16, not float32"),
        (lambda p: p | {"device": p["device"] | {"name": "Z80"}}, "of Z80"),
        (lambda p: {}, "is no device profile"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(
    change: Callable[[dict[str, Any]], dict[str, Any]],
    said: str,
    calibrated: Path,
    tiny_model: Path,
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(change(json.loads(calibrated.read_text()))))
    words = ("--input", str(archive), "--model", str(tiny_model), "--profile", str(other))
    assert said in plan(capsys, *words, code=2)
    assert "cannot be read" in plan(capsys, *words[:-1], str(tmp_path / "none.json"), code=2)


def test_without_verification_a_draft_needs_a_retrieval_test_that_it_passed(
    calibrated: Path,
    tiny_model: Path,
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = json.loads(calibrated.read_text())
    words = ["--input", str(archive), "--model", str(tiny_model), "--mode", "sparse"]
    assert main(words, "plan.py", plan_only=True) == 0
    assert "the quality of its texts is not measured" in capsys.readouterr().err
    assert "holds no retrieval test of this draft" in plan(
        capsys, *words, "--profile", str(calibrated), code=2
    )
    for sparse, code in ((20, 2), (29, 0)):
        content["drafts"][0]["retrieved"] = [
            {"context": 200, "asked": 32, "dense": 30, "sparse": sparse}
        ]
        tried = tmp_path / f"{sparse}.json"
        tried.write_text(json.dumps(content))
        told = plan(capsys, *words, "--profile", str(tried), code=code)
        assert not code or "it found 20 of the 30 answers that the dense loop found, of 32" in told


def test_where_nothing_fits_a_plan_says_what_would_help(
    calibrated: Path,
    tiny_model: Path,
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = json.loads(calibrated.read_text())
    small = tmp_path / "small.json"
    small.write_text(json.dumps(content | {"device": content["device"] | {"memory": 1e5}}))
    error = plan(
        capsys, "--input", str(archive), "--model", str(tiny_model), "--profile", str(small), code=2
    )
    assert "would help" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", ""], "--output is missing"),
        (
            ["--output", "x", "--dtype", "int3"],
            "'--dtype': 'int3' is not one of 'float32', 'bfloat16'",
        ),
        (["--output", "x", "--contexts", "a,b"], "--contexts is 'a,b'"),
        (["--output", "x", "--drafts", "nothing"], "--draft 'nothing'"),
        (["--output", "x", "--device", "cuda"], "this machine has none"),
    ],
)
def test_wrong_flags_are_named(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        calibrate.main(words)
