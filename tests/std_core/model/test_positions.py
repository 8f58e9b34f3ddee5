"""Positions by the reference rule: against tables written by hand, and against vLLM's rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForImageTextToText

from jobs.suites.shared import reference
from std_core import sparse_to_dense
from std_core.model.checkpoint import ModelInputs
from std_core.model.families import IMAGE, TEXT, VIDEO
from std_core.model.model import Model
from std_core.model.positions import MRope, reference_positions, rule_of
from std_core.types import RequestError, Sampling

QWEN2 = MRope(merge_size=2)
QWEN2_5 = MRope(merge_size=2, tokens_per_second=2)
QWEN3 = MRope(merge_size=2, splits_videos=True)
Grids = Sequence[tuple[int, int, int]]  # temporal patches, rows and columns of patches


def prompt(
    types: Sequence[int], images: Grids = (), videos: Grids = (), seconds: Sequence[float] = ()
) -> ModelInputs:
    return ModelInputs(
        torch.zeros(1, len(types), dtype=torch.long),
        token_types=torch.tensor([types]),
        video_patches=None,
        video_grid=torch.tensor(videos) if videos else None,
        image_patches=None,
        image_grid=torch.tensor(images) if images else None,
        second_per_grid=torch.tensor(seconds) if seconds else None,
    )


# a prompt, and each token's temporal, row and column position
TABLES: dict[str, tuple[MRope, ModelInputs, list[list[int]]]] = {
    "text": (QWEN2, prompt([TEXT] * 3), [[0, 1, 2]] * 3),
    "image": (
        QWEN2,
        prompt([TEXT] * 2 + [IMAGE] * 6 + [TEXT] * 2, images=[(1, 4, 6)]),
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
        ],
    ),
    "video with more temporal patches than columns": (
        QWEN2,
        prompt([TEXT] + [VIDEO] * 4 + [TEXT] * 2, videos=[(4, 2, 2)]),
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 5, 6], [0, 1, 1, 1, 1, 5, 6]],
    ),
    "two videos and an image": (
        QWEN2,
        prompt(
            [TEXT] + [VIDEO] * 6 + [TEXT] + [IMAGE] + [TEXT] + [VIDEO] * 2 + [TEXT],
            images=[(1, 2, 2)],
            videos=[(3, 2, 4), (2, 2, 2)],
        ),
        [
            [0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9],
            [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 7, 7, 9],
            [0, 1, 2, 1, 2, 1, 2, 4, 5, 6, 7, 7, 9],
        ],
    ),
    "two videos without text between them": (
        QWEN2,
        prompt([VIDEO] * 4 + [TEXT], videos=[(2, 2, 2), (2, 2, 2)]),
        [[0, 1, 2, 3, 4], [0, 0, 2, 2, 4], [0, 0, 2, 2, 4]],
    ),
    "a second per temporal patch": (
        QWEN2_5,
        prompt([TEXT] + [VIDEO] * 3 + [TEXT], videos=[(3, 2, 2)], seconds=[1.0]),
        [[0, 1, 3, 5, 6], [0, 1, 1, 1, 6], [0, 1, 1, 1, 6]],
    ),
    "seconds that are not given count as 1": (
        QWEN2_5,
        prompt([TEXT] + [VIDEO] * 3 + [TEXT], videos=[(3, 2, 2)]),
        [[0, 1, 3, 5, 6], [0, 1, 1, 1, 6], [0, 1, 1, 1, 6]],
    ),
    "less than a second per temporal patch": (
        QWEN2_5,
        prompt([VIDEO] * 5 + [TEXT], videos=[(5, 2, 2)], seconds=[0.25]),
        [[0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, 3]],
    ),
    "seconds of several videos": (
        QWEN2_5,
        prompt(
            [VIDEO] * 4 + [TEXT] + [VIDEO] * 2, videos=[(4, 2, 2), (2, 2, 2)], seconds=[0.7, 2.0]
        ),
        [[0, 1, 2, 4, 5, 6, 10], [0, 0, 0, 0, 5, 6, 6], [0, 0, 0, 0, 5, 6, 6]],
    ),
    "image of a model that counts seconds": (
        QWEN2_5,
        prompt([IMAGE] * 2 + [TEXT], images=[(1, 2, 4)]),
        [[0, 0, 2], [0, 0, 2], [0, 1, 2]],
    ),
    "temporal patches between timestamps": (
        QWEN3,
        prompt([TEXT] + [VIDEO] * 2 + [TEXT] * 2 + [VIDEO] * 2 + [TEXT], videos=[(2, 2, 4)]),
        [
            [0, 1, 1, 3, 4, 5, 5, 7],
            [0, 1, 1, 3, 4, 5, 5, 7],
            [0, 1, 2, 3, 4, 5, 6, 7],
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_positions_are_those_of_the_table(name: str) -> None:
    mrope, inputs, expected = TABLES[name]
    assert reference_positions(inputs, mrope)[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (prompt([VIDEO] * 3, videos=[(2, 2, 2)]), "1 placeholders are not covered"),
        (prompt([VIDEO], videos=[(2, 2, 2)]), "1 tokens more than placeholders"),
        (prompt([IMAGE], videos=[(1, 2, 2)]), "1 placeholders are not covered"),
    ],
)
def test_other_placeholders_are_an_error_of_the_request(inputs: ModelInputs, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        reference_positions(inputs, QWEN2)


Piece = tuple[int, tuple[int, int, int], float]  # text before a video, its grid, its seconds
pieces = st.tuples(
    st.integers(1, 5),
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.3, 3.0]),
)


def vllm_positions(prompt_pieces: list[Piece], tokens_per_second: float | None) -> np.ndarray:
    """vLLM's rule, token by token: a text token and a video start one past the largest position
    before them."""
    columns: list[tuple[int, int, int]] = []

    def start() -> int:
        return max((max(column) for column in columns), default=-1) + 1

    for text, (times, rows, cols), seconds in prompt_pieces:
        for _ in range(text):
            columns.append((start(),) * 3)
        first = start()
        for time in range(times):
            if tokens_per_second is None:
                temporal = time
            else:
                temporal = int(np.float32(time) * np.float32(seconds * tokens_per_second))
            columns += [
                (first + temporal, first + row, first + col)
                for row in range(rows)
                for col in range(cols)
            ]
    columns.append((start(),) * 3)
    return np.array(columns).T


@pytest.mark.parametrize("tokens_per_second", [None, 2, 4])
@given(prompt_pieces=st.lists(pieces, min_size=1, max_size=4))
def test_positions_are_vllms(prompt_pieces: list[Piece], tokens_per_second: int | None) -> None:
    types: list[int] = []
    for text, grid, _ in prompt_pieces:
        types += [TEXT] * text + [VIDEO] * int(np.prod(grid))
    inputs = prompt(
        [*types, TEXT],
        videos=[(times, 2 * rows, 2 * cols) for _, (times, rows, cols), _ in prompt_pieces],
        seconds=[seconds for _, _, seconds in prompt_pieces],
    )
    found = reference_positions(inputs, MRope(2, tokens_per_second=tokens_per_second))
    expected = vllm_positions(prompt_pieces, tokens_per_second)
    assert found[:, 0].tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_the_numbering_is_read_from_the_configuration(
    families: Callable[[str], Path], family: str
) -> None:
    config = AutoConfig.from_pretrained(families(family))
    merge_size = getattr(config.vision_config, "spatial_merge_size", None)
    assert (
        MRope.of(config)
        == {
            "qwen2_vl": MRope(merge_size),
            "qwen2_5_vl": MRope(
                merge_size,
                tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
            ),
            "qwen3_vl": MRope(merge_size, splits_videos=True),
            "llava_onevision": None,
        }[family]
    )


def test_a_checkpoint_names_its_rule(families: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(families("qwen2_vl"))
    assert rule_of(config) == "reference"
    config.mrope_position_rule = "transformers"
    assert rule_of(config) == "transformers"
    config.mrope_position_rule = "mine"
    with pytest.raises(ValueError, match="'mine'; there are reference and transformers"):
        rule_of(config)


def long_video(hf: Any, times: int) -> dict[str, torch.Tensor]:
    """A processor's batch: a video of one visual token per temporal patch, then two of text."""
    vision = hf.config.vision_config
    side = vision.spatial_merge_size
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(times)
    ids = [7, *[hf.config.video_token_id] * times, 8, 9]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([[TEXT, *[VIDEO] * times, TEXT, TEXT]]),
        "pixel_values_videos": torch.randn(times * side**2, patch, generator=generator),
        "video_grid_thw": torch.tensor([[times, side, side]]),
    }


@pytest.fixture(scope="module")
def hf(families: Callable[[str], Path]) -> Any:
    return AutoModelForImageTextToText.from_pretrained(families("qwen2_vl"), dtype=torch.float32)


def test_generate_warns_once_where_the_rules_differ(
    hf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fast = sparse_to_dense(hf)
    with caplog.at_level(logging.WARNING, logger="std_core.generate"):
        fast.generate(**long_video(hf, 1), max_new_tokens=2)
        assert not caplog.records
        fast.generate(**long_video(hf, 9), max_new_tokens=2)
        fast.generate(**long_video(hf, 9), max_new_tokens=2)
    (record,) = caplog.records
    assert 'positions="reference"' in record.getMessage()


def test_generate_takes_the_reference_rule(hf: Any, caplog: pytest.LogCaptureFixture) -> None:
    batch = long_video(hf, 40)
    with caplog.at_level(logging.WARNING, logger="std_core.generate"):
        ids = sparse_to_dense(hf, positions="reference").generate(**batch, max_new_tokens=12)
    assert not caplog.records
    inputs = ModelInputs(
        batch["input_ids"],
        token_types=batch["mm_token_type_ids"],
        video_patches=batch["pixel_values_videos"],
        video_grid=batch["video_grid_thw"],
    )
    model = Model(AutoModelForImageTextToText.from_pretrained(hf.name_or_path, dtype=torch.float32))
    assert model.position_rule == "reference"
    expected = reference.generate(model, inputs, Sampling(max_tokens=12))
    assert ids[0, batch["input_ids"].shape[1] :].tolist() == expected
