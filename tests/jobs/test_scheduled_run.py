"""A run that chooses what drafts, wave by wave, by a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import read
from pipeline.config import parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import run_job
from pipeline.plan.profile_file import write_profile
from pipeline.records import UsageError
from std_core.cost_model.acceptance import AcceptanceCounts
from std_core.cost_model.device_specs import local_device
from std_core.cost_model.profile import (
    CalibratedDraft,
    DraftSetupLatency,
    LatencyModel,
    PrefillLatency,
    Profile,
)
from std_core.model.checkpoint import Checkpoint
from std_core.types import Draft

BANDWIDTH = 1e9  # bytes/s
PROMPTS = [f"--prompt={word}" for word in ("one", "two", "three", "four", "five")]


@pytest.fixture
def archive(tmp_path: Path, clips: list[bytes]) -> Path:
    """Two short clips and two long ones."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number, clip in enumerate((clips[0], clips[2], clips[0], clips[2])):
        (folder / f"{number}.mp4").write_bytes(clip)
    return folder


@pytest.fixture
def run(tiny_model: Path, archive: Path, tmp_path: Path, ray_cluster: None) -> Any:
    def start(name: str, *words: str) -> list[dict[str, Any]]:
        flags = [
            "--input",
            str(archive),
            "--output",
            str(tmp_path / name),
            "--model",
            str(tiny_model),
            *PROMPTS,
        ]
        run_job(
            parse_job([*flags, "--max-tokens=6", "--max-num-seqs=1", *words], "test"),
            survey=InProcessSurvey,
        )
        return read(str(tmp_path / name)).to_pylist()

    return start


def profile_with_a_crossing(model: Path, context: float, device: str = "") -> Profile:
    """A dense step takes its bytes' time, a draft step as long whatever the context: from `context`
    tokens on that pays for texts of six tokens, of which the prefill writes one."""
    checkpoint = Checkpoint.load(str(model))
    model_size = checkpoint.model_size("float32")
    here = local_device("cpu")
    there = type(here)(device or here.name, "cpu", BANDWIDTH, here.memory, here.flops)
    dense = model_size.step_bytes([context]) / BANDWIDTH
    std = CalibratedDraft(
        Draft("std"),
        LatencyModel(0.0, dense / 1.53),
        DraftSetupLatency(),
        (AcceptanceCounts(200, "caption", (90,), (10,)),),
    )
    return Profile(
        there,
        model=checkpoint.revision,
        dtype="float32",
        model_size=model_size,
        latency=LatencyModel(1.0),
        prefill=PrefillLatency(0.0, 1e-4, 0.0),
        vision_s_per_token=1e-4,
        drafts=(std,),
    )


def test_long_contexts_draft_and_short_ones_do_not_and_texts_are_the_same(
    run: Any, tiny_model: Path, tmp_path: Path
) -> None:
    dense = {(row["video_uri"], row["prompt"]): row for row in run("dense", "--mode=dense")}
    visual = sorted({row["num_visual_tokens"] for row in dense.values()})
    text = max(row["num_prompt_tokens"] for row in dense.values())
    assert len(visual) == 2 and visual[1] > 2 * visual[0]
    crossing = text + sum(visual) / 2
    path = str(tmp_path / "profile.json")
    write_profile(path, profile_with_a_crossing(tiny_model, crossing))
    rows = run("auto", f"--profile={path}")
    assert {row["draft"] for row in dense.values()} == {"dense"} and len(rows) == len(dense) == 20
    assert {row["draft"] for row in rows} == {"dense", "std"}
    drafted = []
    for row in rows:
        assert row["text"] == dense[row["video_uri"], row["prompt"]]["text"]
        long = row["num_prompt_tokens"] + row["num_visual_tokens"] > crossing
        assert row["draft"] == ("std" if long else "dense"), row
        drafted += [row["proposed"] > 0] * long
        assert long or not row["proposed"]
    assert any(drafted) and not all(
        drafted
    )  # an untrained model accepts next to nothing: the gate closes


def test_a_profile_of_another_device_is_refused_before_anything_starts(
    run: Any, tiny_model: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "profile.json")
    write_profile(path, profile_with_a_crossing(tiny_model, 100, "another processor"))
    with pytest.raises(UsageError, match="is of another processor, this is"):
        run("out", f"--profile={path}")
    assert not (tmp_path / "out").exists()
