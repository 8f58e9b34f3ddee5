from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from std_core.cost_model.memory import TEXT_SUFFIX
from std_core.model.checkpoint import Checkpoint, checkpoint_hash
from std_core.types import Geometry, Request, RequestError


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return Checkpoint.load(str(tiny_model))


@pytest.mark.parametrize(("frames", "height", "width"), [(2, 84, 112), (4, 112, 84), (7, 56, 140)])
def test_geometry_and_prompt_count_the_processors_tokens(
    checkpoint: Checkpoint, frames: int, height: int, width: int
) -> None:
    inputs = checkpoint.preprocess(
        Request(
            "a",
            "How many scenes are there?",
            torch.zeros(frames, height, width, 3, dtype=torch.uint8),
        )
    )
    assert len(inputs.visual_positions) == checkpoint.geometry.tokens(frames, height, width)
    assert inputs.ids.shape[1] - len(inputs.visual_positions) == checkpoint.count_prompt_tokens(
        "How many scenes are there?"
    )


def test_geometry_is_read_from_the_processor(checkpoint: Checkpoint) -> None:
    assert checkpoint.geometry == Geometry(
        14, temporal_patch_size=2, merge_size=2, min_pixels=56 * 56, max_pixels=112 * 112
    )
    assert checkpoint.max_model_len == 32768


@pytest.mark.parametrize(
    "prompt", ["", "Was läuft? 视频\n\t🎬", "{{ braces }} {% raw %}", "<|im_end|>"]
)
def test_any_prompt_is_tokenized(checkpoint: Checkpoint, prompt: str) -> None:
    inputs = checkpoint.preprocess(
        Request("a", prompt, torch.zeros(2, 84, 84, 3, dtype=torch.uint8))
    )
    assert inputs.ids.shape[1] == checkpoint.count_prompt_tokens(prompt) + 9
    assert prompt in checkpoint.processor.tokenizer.decode(inputs.ids[0])


def test_frames_of_a_wrong_shape_or_size_are_an_invalid_request(checkpoint: Checkpoint) -> None:
    for frames in (
        torch.zeros(84, 84, 3, dtype=torch.uint8),
        torch.zeros(2, 50, 84, 3, dtype=torch.uint8),
    ):
        with pytest.raises(RequestError) as caught:
            checkpoint.preprocess(Request("a", "?", frames))
        assert caught.value.code == "invalid_request"


def test_a_changed_weight_changes_the_revision(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert checkpoint_hash(str(copy)) == checkpoint_hash(str(tiny_model))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoint_hash(str(copy)) != checkpoint_hash(str(tiny_model))


def test_a_single_files_revision_depends_on_name_and_content(tmp_path: Path) -> None:
    hashes = set()
    for name, content in (("a.gguf", b"x"), ("b.gguf", b"x"), ("a.gguf", b"y")):
        (tmp_path / name).write_bytes(content)
        hashes.add(checkpoint_hash(str(tmp_path / name)))
    assert len(hashes) == 3


# --------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="session")
def llama(families: Callable[[str], Path]) -> Checkpoint:
    return Checkpoint.load(str(families("llama")))


def test_a_text_models_prompt_is_rendered_with_its_chat_template(llama: Checkpoint) -> None:
    inputs = llama.preprocess(Request("a", "How many scenes are there?"))
    assert not llama.supports_video
    assert inputs.ids.shape[1] == llama.count_prompt_tokens("How many scenes are there?")
    expected = "<|im_start|>user\nHow many scenes are there?<|im_end|>\n<|im_start|>assistant\n"
    assert llama.tokenizer.decode(inputs.ids[0]) == expected


def test_without_a_chat_template_the_prompt_is_tokenized_unchanged(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(families("llama"), tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    bare = Checkpoint.load(str(folder))
    assert bare.tokenizer.decode(bare.preprocess(Request("a", "Scene 1:")).ids[0]) == "Scene 1:"
    with pytest.raises(RequestError, match="no tokens"):
        bare.preprocess(Request("a", ""))


def test_a_text_model_takes_no_video_and_no_image(llama: Checkpoint) -> None:
    frames = torch.zeros(2, 84, 84, 3, dtype=torch.uint8)
    for visual in ({"frames": frames}, {"videos": (frames,)}, {"images": (frames[0],)}):
        with pytest.raises(RequestError) as caught:
            llama.preprocess(Request("a", "?", **visual))  # type: ignore[arg-type]
        assert caught.value.code == "invalid_request" and "llama" in caught.value.message


@pytest.mark.parametrize("words", [1, 50, 400])
def test_without_visual_tokens_the_prefix_is_all_but_the_last_tokens(
    llama: Checkpoint, words: int
) -> None:
    inputs = llama.preprocess(Request("a", "square " * words))
    assert inputs.prefix_length == max(0, inputs.ids.shape[1] - TEXT_SUFFIX)
    assert inputs.selectable_positions.tolist() == list(range(inputs.prefix_length))


def test_a_video_llm_takes_a_request_without_video(checkpoint: Checkpoint) -> None:
    inputs = checkpoint.preprocess(Request("a", "What is a square?"))
    assert not len(inputs.visual_positions) and inputs.video_patches is None
    assert checkpoint.tokenizer.decode(inputs.ids[0]) == checkpoint.render("What is a square?", 0)


@pytest.mark.parametrize("placeholder", ["<|video_pad|>", "<|image_pad|>"])
@pytest.mark.parametrize("frames", [None, torch.zeros(2, 84, 84, 3, dtype=torch.uint8)])
def test_a_placeholder_in_the_prompt_is_an_invalid_request(
    checkpoint: Checkpoint, placeholder: str, frames: torch.Tensor | None
) -> None:
    with pytest.raises(RequestError) as caught:
        checkpoint.preprocess(Request("a", f"What is {placeholder}?", frames))
    assert caught.value.code == "invalid_request"


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "content", [{}, {"config.json": "{"}, {"config.json": '{"model_type": "llama"}'}]
)
def test_a_folder_without_a_model_is_an_error_of_one_line(
    tmp_path: Path, content: dict[str, str]
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        Checkpoint.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_an_error_of_one_line(tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + bytes(range(200)))
    for path in (junk, tmp_path / "missing.gguf"):
        with pytest.raises(ValueError) as caught:
            Checkpoint.load(str(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_checkpoint_is_never_run_nor_asked_for(
    known: bool, families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers turns an exception of `input` into a ValueError, so calls are counted
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "n")
    folder = tmp_path / "model"
    shutil.copytree(families("llama"), folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name, entries in {
        "config.json": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.Tokenizer", None]},
    }.items():
        settings = json.loads((folder / name).read_text()) | {"auto_map": entries}
        if not known:
            settings.pop("tokenizer_class", None)
            settings |= {"model_type": "no_such_type"} if name == "config.json" else {}
        (folder / name).write_text(json.dumps(settings))
    if known:  # transformers' own classes serve
        assert Checkpoint.load(str(folder)).config.model_type == "llama"
    else:
        with pytest.raises(ValueError, match="cannot be loaded") as raised:
            Checkpoint.load(str(folder))
        assert "\n" not in str(raised.value)
    assert not questions
    assert not (tmp_path / "ran").exists()
