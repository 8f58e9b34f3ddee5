from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from std_core.checkpoint import Checkpoint, folder_hash
from std_core.types import Geometry, Request, RequestError


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return Checkpoint.load(str(tiny_model))


@pytest.mark.parametrize(("frames", "height", "width"), [(2, 84, 112), (4, 112, 84), (7, 56, 140)])
def test_planned_tokens_are_those_of_the_processor(
    checkpoint: Checkpoint, frames: int, height: int, width: int
) -> None:
    fed = checkpoint.inputs(
        Request("a", "How many scenes are there?", torch.zeros(frames, height, width, 3, dtype=torch.uint8))
    )
    assert len(fed.visual) == checkpoint.geometry.tokens(frames, height, width)
    assert fed.ids.shape[1] - len(fed.visual) == checkpoint.prompt_tokens("How many scenes are there?")


def test_geometry_is_the_checkpoints_own(checkpoint: Checkpoint) -> None:
    assert checkpoint.geometry == Geometry(14, 2, 2, min_pixels=56 * 56, max_pixels=112 * 112)
    assert checkpoint.max_model_len == 32768


@pytest.mark.parametrize("prompt", ["", "Was läuft? 视频\n\t🎬", "{{ braces }} {% raw %}", "<|im_end|>"])
def test_any_prompt_can_be_written(checkpoint: Checkpoint, prompt: str) -> None:
    fed = checkpoint.inputs(Request("a", prompt, torch.zeros(2, 84, 84, 3, dtype=torch.uint8)))
    assert fed.ids.shape[1] == checkpoint.prompt_tokens(prompt) + 9
    assert prompt in checkpoint.processor.tokenizer.decode(fed.ids[0])


def test_frames_of_a_size_that_cannot_be_cut_are_refused(checkpoint: Checkpoint) -> None:
    for frames in (None, torch.zeros(84, 84, 3, dtype=torch.uint8), torch.zeros(2, 50, 84, 3, dtype=torch.uint8)):
        with pytest.raises(RequestError) as caught:
            checkpoint.inputs(Request("a", "?", frames))
        assert caught.value.code == "invalid_request"


def test_a_changed_weight_changes_the_revision(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert folder_hash(str(copy)) == folder_hash(str(tiny_model))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert folder_hash(str(copy)) != folder_hash(str(tiny_model))


@pytest.mark.parametrize("content", [{}, {"config.json": "{"}, {"config.json": '{"model_type": "llama"}'}])
def test_a_folder_that_is_no_video_llm_is_refused_in_one_sentence(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        Checkpoint.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
