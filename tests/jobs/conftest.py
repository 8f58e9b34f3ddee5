"""Real clips."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from jobs.demo_model import world


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Suites set a number of threads for their process, which stays; here two threads of small
    products mostly wait for one another, for minutes where the cores have other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def clips() -> list[bytes]:
    """MP4 files of 1, 2 and 3 scenes, two of each."""
    return [world.make_clip(seed, 1 + seed % 3)[1] for seed in range(6)]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory, clips: list[bytes]) -> Path:
    """A folder of six good clips, which nobody changes."""
    folder = tmp_path_factory.mktemp("shelf")
    for number, clip in enumerate(clips):
        (folder / f"good-{number}.mp4").write_bytes(clip)
    return folder


@pytest.fixture
def archive(tmp_path: Path, shelf: Path) -> Path:
    """A folder of six good clips of the test's own."""
    return shutil.copytree(shelf, tmp_path / "videos")
