"""The quality suite's long clips; what it says of the shipped model at full size is in the
README."""

from __future__ import annotations

import json
import random

import pytest

from jobs import benchmark
from jobs.demo_model import world
from jobs.suites import demo_quality
from pipeline.config import ROOT
from pipeline.records import UsageError
from std_core.model.checkpoint import Checkpoint


@pytest.mark.parametrize("visual", [4096, 16384])
def test_a_long_clip_has_about_the_tokens_asked_for(
    visual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half of what one more turn of each of 12 scenes would add; without drawing a frame."""
    geometry = Checkpoint.load(str(ROOT / "conf" / "model" / "demo")).geometry
    drawn = []
    monkeypatch.setattr(world, "write_clip", lambda *given: drawn.append(given) or ((), b""))
    rng = random.Random(1)
    for _ in range(40):
        demo_quality._clip(rng, visual, geometry)
    assert {scenes for _, scenes, *_ in drawn} == set(range(4, world.MAX_SCENES + 1))
    for _, scenes, _, rate, repeats in drawn:
        frames = int(scenes * repeats * world.SCENE_SECONDS * rate)
        assert abs(geometry.tokens(frames, 112, 112) - visual) <= 12 * 32 / 2


def test_long_clips_are_read_whole(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--suite", "demo_quality", "--seed", "3", "--clips", "2", "--visual-tokens", "1000"]
    assert benchmark.main(argv) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert abs(figures["visual_tokens"] - 1000) <= 12 * 32 / 2
    assert figures["requests"] == 20
    assert 0 <= figures["caption_clause_accuracy"] <= figures["answer_accuracy"] <= 1
    assert set(figures["by_scenes"]) <= {str(n) for n in range(4, 13)}


def test_a_useless_number_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="--visual-tokens is 0"):
        benchmark.main(["--suite", "demo_quality", "--visual-tokens", "0"])
