"""Real clips."""

from __future__ import annotations

from pathlib import Path

import pytest

import demo_world as world


@pytest.fixture(scope="session")
def clips() -> list[bytes]:
    """MP4 files of 1, 2 and 3 scenes, two of each."""
    return [world.write_clip(seed, 1 + seed % 3)[1] for seed in range(6)]


@pytest.fixture
def archive(tmp_path: Path, clips: list[bytes]) -> Path:
    """A folder of six good clips."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number, clip in enumerate(clips):
        (folder / f"good-{number}.mp4").write_bytes(clip)
    return folder
