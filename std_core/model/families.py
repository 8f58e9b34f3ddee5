"""Which checkpoints can be driven, told from the configuration alone, and in what the Video-LLMs
among them differ: how frames become tokens, and how the vision tower is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from std_core.cost_model.memory import VISION_CHUNK
from std_core.types import Geometry


@dataclass(frozen=True)
class Family:
    """In what a kind of Video-LLM differs from others.

    Args: geometry: from its processor. look: (model, kind, patches, grid) to (tokens, hidden ×
        levels), kind 1 for images and 2 for videos, a piece of
            at most `VISION_CHUNK` tokens of a video at a time. Levels above the first are what DeepStack
            adds behind the first layers.
        resizes: its processor brings frames and images to size by itself; else they come in the
            size of the plan.
        timed: its processor writes the time of each temporal patch into the prompt.
    """

    geometry: Callable[[Any], Geometry]
    look: Callable[[Any, int, torch.Tensor, torch.Tensor], Iterator[torch.Tensor]]
    resizes: bool = False
    timed: bool = False


def has_vision_tower(config: Any) -> bool:
    """Whether a model of this configuration has a vision tower; else it reads text alone."""
    return hasattr(config, "vision_config")


def generation_class(config: Any) -> Any | None:
    """The transformers class that writes text with such a configuration; None if there is none."""
    mapping = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if has_vision_tower(config)
        else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return mapping.get(type(config), None)  # the mapping's `get` asks for a default


def unsupported_reason(config: Any, writer: Any | None) -> str | None:
    """Why a model of this configuration and class cannot be driven, as the end of a sentence; None
    if it can, as far as a configuration tells."""
    text = config.get_text_config()
    if writer is None:
        return "writes no text"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"has layers of {', '.join(sorted(kinds - {'full_attention'}))}; all must be of full_attention"
    if not hasattr(text, "layer_types") and (window := sliding_window_of(text)):
        return f"attends through a sliding window of {window} tokens; all layers must be of full attention"
    if not getattr(text, "is_decoder", True):
        return "reads in both directions; a token must see only what lies before it"
    if not writer._supports_attention_backend:
        return "has an attention of its own, which cannot be driven"
    if has_vision_tower(config) and config.model_type not in FAMILIES:
        return f"is none of the Video-LLMs whose frames can be fed: {', '.join(FAMILIES)}"
    return None


def sliding_window_of(text: Any) -> int | None:
    """The sliding window, in tokens, of a text configuration; None where it cuts nothing off."""
    window = getattr(text, "sliding_window", None)
    return window if window and window < text.max_position_embeddings else None


# ----------------------------------------------------------------------------------------- geometry


def _per_frame(processor: Any) -> Geometry:
    """Qwen2-VL and 2.5: a budget for each frame, and qwen-vl-utils' cap (nine tenths of 128,000
    tokens' pixels, shared by all frames), which binds above 300 full frames. transformers leaves it
    off where a checkpoint doesn't say, with a warning; here it is off only where the checkpoint
    says so (`cap_pixels_per_frame: false`)."""
    video = processor.video_processor
    token = (video.patch_size * video.merge_size) ** 2
    capped = getattr(video, "cap_pixels_per_frame", None) is not False
    return Geometry(
        patch_size=video.patch_size,
        temporal_patch_size=video.temporal_patch_size,
        merge_size=video.merge_size,
        min_pixels=video.size["shortest_edge"],
        max_pixels=video.size["longest_edge"],
        total_pixels=int(video.max_video_tokens * token * 0.9) if capped else None,
    )


def _per_video(processor: Any) -> Geometry:
    """Qwen3-VL: a budget for all frames, and the reference implementation's cap for each
    (`cap_pixels_per_frame`)."""
    video = processor.video_processor
    token = (video.patch_size * video.merge_size) ** 2
    return Geometry(
        patch_size=video.patch_size,
        temporal_patch_size=video.temporal_patch_size,
        merge_size=video.merge_size,
        min_pixels=token,
        max_pixels=video.max_video_tokens * token,
        video_pixels=video.size["longest_edge"],
    )


def _fixed(processor: Any) -> Geometry:
    """LLaVA-OneVision: frames of one size, each pooled 2 × 2, and one newline behind the last."""
    size = processor.video_processor.size
    side = math.isqrt(processor.num_image_tokens)
    return Geometry(
        patch_size=size["height"] // side,
        temporal_patch_size=1,
        merge_size=1,
        frame=(size["height"], size["width"]),
        frame_tokens=math.ceil(side / 2) ** 2,
        closing_tokens=1,
    )


# ------------------------------------------------------------------------------------------- vision


def _look_qwen(
    hf: Any, kind: int, patches: torch.Tensor, grid: torch.Tensor
) -> Iterator[torch.Tensor]:
    pieces = (
        iter([(patches, grid)])
        if kind == 1
        else _frames(patches, grid, hf.config.vision_config.spatial_merge_size)
    )
    for part, shape in pieces:
        yield _features(hf, kind, part, shape)


def _features(hf: Any, kind: int, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Of one piece; what else the tower gives is gone when the next one comes."""
    seen = (hf.get_image_features if kind == 1 else hf.get_video_features)(
        _on(hf, patches), grid.to(hf.device)
    )
    levels = [seen.pooler_output, *getattr(seen, "deepstack_features", [])]
    return _joined([_joined(list(level)) for level in levels], dim=-1)


def _joined(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """A single part as it is: no copy."""
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]


def _frames(
    patches: torch.Tensor, grid: torch.Tensor, merge: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Videos cut between temporal patches, across which no tower of this kind looks."""
    at = 0
    for times, height, width in grid.tolist():
        size = height * width
        most = max(1, VISION_CHUNK * merge**2 // size)
        for begin in range(0, times, most):
            count = min(most, times - begin)
            yield patches[at : at + count * size], torch.tensor([[count, height, width]])
            at += count * size


def _look_llava(
    hf: Any, kind: int, patches: torch.Tensor, grid: torch.Tensor
) -> Iterator[torch.Tensor]:
    if kind == 1:
        shown = hf.get_image_features(
            _on(hf, patches), grid.to(hf.device), batch_num_images=[len(grid)]
        )
        yield torch.cat(shown.pooler_output)
        return
    for frames in patches.split(grid[:, 0].tolist()):  # one by one, since they may differ in frames
        for part in (pieces := frames.split(_frames_at_once(hf))):
            seen = hf.get_video_features(_on(hf, part)[None]).pooler_output[0]
            yield (
                seen if part is pieces[-1] else seen[:-1]
            )  # a newline stands behind the whole video's last frame


def _frames_at_once(hf: Any) -> int:
    vision = hf.config.vision_config
    return max(1, VISION_CHUNK // math.ceil(vision.image_size // vision.patch_size / 2) ** 2)


def _on(hf: Any, patches: torch.Tensor) -> torch.Tensor:
    return patches.to(hf.device, hf.dtype)


FAMILIES = {
    "qwen2_vl": Family(_per_frame, _look_qwen),
    "qwen2_5_vl": Family(_per_frame, _look_qwen),
    "qwen3_vl": Family(_per_video, _look_qwen, timed=True),
    "llava_onevision": Family(_fixed, _look_llava, resizes=True),
}
