"""Requests of any size for a model without a checkpoint: random words around a video of random
patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jobs.suites.shared.random_models import SpecialTokens, TextSize, VisionSize
from std_core.model.checkpoint import ModelInputs

MERGE = 2  # patches per side of a visual token
CHANNELS = 3
TEMPORAL_PATCH = 2  # frames
VIDEO = 2  # type of a video's tokens in `ModelInputs.token_types`
RESERVED_IDS = 8  # special tokens; words have larger ids
TOKENS = SpecialTokens()
TEXT_BEFORE = 4  # tokens before a video


@dataclass(frozen=True)
class ModelSpec:
    """A model of any size; text families have no vision tower.

    Args:
        frame: pixels per side of a video's frame.
    """

    family: str
    text: TextSize
    vision: VisionSize | None = None
    frame: int = 112


@dataclass(frozen=True)
class RequestSize:
    """Size of a request.

    Args:
        frames: temporal patches of the video.
        text: tokens of the prompt.
        max_tokens: tokens that may be written.
    """

    frames: int
    text: int
    max_tokens: int

    def visual_tokens(self, model: ModelSpec) -> int:
        if model.vision is None:
            return 0
        side = model.frame // model.vision.patch // MERGE
        newline = int(model.family == "llava_onevision")  # one behind the last frame
        return self.frames * side**2 + newline


def random_inputs(model: ModelSpec, request: RequestSize, seed: int) -> ModelInputs:
    """A prompt of a model without a processor."""
    rng = torch.Generator().manual_seed(seed)
    types = _token_types(model, request)
    words = torch.randint(RESERVED_IDS, model.text.vocabulary, types.shape, generator=rng)
    if model.vision is None:
        return ModelInputs(words, torch.zeros_like(types))
    ids = torch.where(types == VIDEO, TOKENS.video, words)
    if model.family == "llava_onevision":
        frames = torch.randn(request.frames, CHANNELS, model.frame, model.frame, generator=rng)
        grid = torch.tensor([[request.frames, model.frame, model.frame]])
        return ModelInputs(ids, types, frames, grid)
    side = model.frame // model.vision.patch
    patch_values = CHANNELS * TEMPORAL_PATCH * model.vision.patch**2
    return ModelInputs(
        ids,
        token_types=types,
        video_patches=torch.randn(request.frames * side**2, patch_values, generator=rng),
        video_grid=torch.tensor([[request.frames, side, side]]),
        second_per_grid=torch.tensor([1.0]),
    )


def _token_types(model: ModelSpec, request: RequestSize) -> torch.Tensor:
    """(1, tokens): 0 for text, 2 for the video."""
    visual = request.visual_tokens(model)
    if model.family == "qwen3_vl":  # the time of each frame stands before it, as one token here
        frame_types = [0] + [VIDEO] * (visual // request.frames)
        types = frame_types * request.frames + [0] * (request.text - request.frames)
    else:
        types = [0] * TEXT_BEFORE + [VIDEO] * visual + [0] * (request.text - TEXT_BEFORE)
    return torch.tensor([types])
