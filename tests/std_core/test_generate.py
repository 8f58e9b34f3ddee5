"""`sparse_to_dense(model).generate` against the model's own `generate`, on processors' batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from jobs.suites.shared import tiny_models
from std_core import sparse_to_dense
from std_core.model.checkpoint import Checkpoint
from std_core.types import Draft

TEXT = ("llama", "qwen3")


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def hf(name: str, families: Callable[[str], Path]) -> Any:
    auto = AutoModelForCausalLM if name in TEXT else AutoModelForImageTextToText
    return auto.from_pretrained(families(name), dtype=torch.float32)


def random_frames(seed: int, *shape: int) -> torch.Tensor:
    """(*shape, 3, 56, 84) uint8."""
    return torch.randint(
        0,
        256,
        (*shape, 3, 56, 84),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.fixture(scope="module")
def batch(name: str, hf: Any, families: Callable[[str], Path]) -> dict[str, Any]:
    """Three rows, padded on the left.

    A video, text alone, two videos; for a text model three prompts.
    """
    processor = Checkpoint.load(str(families(name))).processor
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side = "left"
    questions = [
        "What moves?",
        "Is it red or blue or " + "green or " * 30 + "white?",
        "Which is larger?",
    ]
    if name in TEXT:
        return dict(tokenizer(questions, padding=True, return_tensors="pt"))
    videos = [1, 0, 2]
    content = [
        [{"type": "video"}] * n + [{"type": "text", "text": q}]
        for n, q in zip(videos, questions, strict=True)
    ]
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": c}], add_generation_prompt=True, tokenize=False
        )
        for c in content
    ]
    clips = [random_frames(n, 4) for n in range(3)]
    size: dict[str, Any] = {} if name == "llava_onevision" else {"do_resize": False}
    sampled = [{"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}] * 3
    out = processor(
        text=texts,
        videos=clips,
        video_metadata=sampled,
        padding=True,
        do_sample_frames=False,
        return_tensors="pt",
        **size,
    )
    return {k: v for k, v in out.items() if k != "video_metadata"}


@pytest.mark.parametrize("draft", [None, Draft("random", k=2, gamma=3)])
def test_tokens_equal_the_models_own_generate(
    hf: Any, batch: dict[str, Any], draft: Draft | None
) -> None:
    fast = sparse_to_dense(hf, draft, max_num_seqs=2)
    ids = fast.generate(**batch, max_new_tokens=20)
    # the model's own `generate` still works
    assert torch.equal(ids, hf.generate(**batch, max_new_tokens=20, do_sample=False))
    assert [r.proposed > 0 for r in fast.results] == [True] * 3


def test_each_row_has_its_own_images(name: str, hf: Any, families: Callable[[str], Path]) -> None:
    if name in TEXT:
        pytest.skip("a text model takes no images")
    processor = Checkpoint.load(str(families(name))).processor
    processor.tokenizer.padding_side = "left"
    images = [[random_frames(1)], [random_frames(5), random_frames(6)]]
    texts = [
        processor.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}] * len(row) + [{"type": "text", "text": "What?"}],
                }
            ],
            add_generation_prompt=True,
            tokenize=False,
        )
        for row in images
    ]
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    ids = sparse_to_dense(hf).generate(**batch, max_new_tokens=12)
    assert torch.equal(ids, hf.generate(**batch, max_new_tokens=12, do_sample=False))


def test_sampling_arguments_are_applied(
    hf: Any, families: Callable[[str], Path], name: str
) -> None:
    fast = sparse_to_dense(hf, Draft("std", keep=0.3))
    ids = torch.tensor(
        Checkpoint.load(str(families(name))).tokenizer(["a red square moves up"])["input_ids"]
    )
    settings: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "min_new_tokens": 3,
        "max_new_tokens": 16,
    }
    assert torch.equal(
        fast.generate(ids, do_sample=False, **settings),
        hf.generate(ids, do_sample=False, **settings),
    )
    sampled = [
        fast.generate(ids, do_sample=True, seed=seed, max_new_tokens=16).tolist()
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_unseeded_sampling_is_governed_by_manual_seed(
    hf: Any, families: Callable[[str], Path], name: str
) -> None:
    fast = sparse_to_dense(hf)
    ids = torch.tensor(
        Checkpoint.load(str(families(name))).tokenizer(["a red square moves up"])["input_ids"]
    )

    def sampled() -> list[int]:
        return fast.generate(ids, do_sample=True, temperature=5.0, max_new_tokens=16)[0].tolist()

    torch.manual_seed(0)
    texts = [sampled() for _ in range(3)]
    assert len(set(map(tuple, texts))) == 3
    torch.manual_seed(0)
    assert [sampled() for _ in range(3)] == texts


def test_unsupported_arguments_are_refused(hf: Any, batch: dict[str, Any], name: str) -> None:
    fast = sparse_to_dense(hf)
    with pytest.raises(ValueError, match="window holds"):
        fast.generate(**batch, max_new_tokens=40_000)
    if name not in TEXT:
        fewer = {"pixel_values_videos": batch["pixel_values_videos"][:1]}
        if "video_grid_thw" in batch:
            grid = batch["video_grid_thw"][:1]
            patches = batch["pixel_values_videos"][: int(grid.prod())]
            fewer = {"pixel_values_videos": patches, "video_grid_thw": grid}
        with pytest.raises(ValueError, match="no number of whole videos"):
            fast.generate(**(batch | fewer), max_new_tokens=4)
