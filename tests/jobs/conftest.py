"""Real clips, and one Ray cluster for all tests of jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo_world as world
from pipeline.config import Job


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


@pytest.fixture(scope="session")
def ray_cluster(s3_endpoint: str) -> Iterator[None]:
    """Ray on this machine; its workers reach the tests' S3 server."""
    from pipeline.run import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # put back afterwards
        with cluster(Job()):
            yield
