"""The suite `demo_quality` on long clips; the shipped model's figures at full size are in
`jobs/suites/README.md`."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jobs import benchmark
from jobs.demo_model import world
from jobs.suites import demo_quality
from pipeline.config import ROOT
from pipeline.records import UsageError
from std_core.model.checkpoint import Checkpoint

# tokens that one more repeat of 12 scenes adds: 2 frame pairs of 16 tokens each
TOKENS_PER_REPEAT = 12 * 32


@pytest.mark.parametrize("visual", [4096, 16384])
def test_a_long_clip_has_about_the_wanted_tokens(
    visual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half a repeat; no frame is drawn here."""
    geometry = Checkpoint.load(str(ROOT / "conf" / "model" / "demo")).geometry
    drawn: list[tuple[int, int, int]] = []

    def record(seed: int, scenes: int, size: Any, rate: int, *, repeats: int) -> None:
        drawn.append((scenes, rate, repeats))

    monkeypatch.setattr(world, "make_clip", record)
    rng = random.Random(1)
    for _ in range(40):
        demo_quality.draw_clip(rng, visual, geometry)
    assert {scenes for scenes, _, _ in drawn} == set(range(4, world.MAX_SCENES + 1))
    for scenes, rate, repeats in drawn:
        frames = int(scenes * repeats * world.SCENE_SECONDS * rate)
        assert abs(geometry.tokens(frames, 112, 112) - visual) <= TOKENS_PER_REPEAT / 2


def test_all_frames_of_long_clips_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--suite", "demo_quality", "--seed", "3", "--clips", "2", "--visual-tokens", "1000"]
    assert benchmark.main(argv) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert abs(figures["visual_tokens"] - 1000) <= TOKENS_PER_REPEAT / 2
    assert figures["requests"] == 20
    assert 0 <= figures["caption_clause_accuracy"] <= figures["answer_accuracy"] <= 1
    assert set(figures["by_scenes"]) <= {str(n) for n in range(4, 13)}


def test_zero_visual_tokens_are_an_error() -> None:
    with pytest.raises(UsageError, match="--visual-tokens is 0"):
        benchmark.main(["--suite", "demo_quality", "--visual-tokens", "0"])
