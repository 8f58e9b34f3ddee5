"""Which models are supported, decided from the configuration alone, and how the supported Video-LLM
families differ: in how frames become tokens, and in how their vision tower is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedModel,
)

from std_core.cost_model.memory import VISION_CHUNK
from std_core.types import Geometry

# transformers' `mm_token_type_ids`
TEXT = 0
IMAGE = 1
VIDEO = 2

# Types of RoPE whose frequencies are fixed. Keys are cached after rotation, and rows of any lengths
# share a forward pass: the frequencies must depend on nothing but the configuration. `mrope` is a
# checkpoint's older name for `default` with sections.
ROPE_TYPES = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})
LENGTH_DEPENDENT_ROPE_TYPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Family:
    """What distinguishes one family of Video-LLMs from the others.

    Args:
        geometry: processor to geometry.
        encode_vision: (model, `IMAGE` or `VIDEO`, patches, grid) to chunks of features, each
            (tokens, hidden × feature levels); a chunk of a video has at most `VISION_CHUNK` tokens.
            Levels above the first are those that DeepStack adds behind the first layers.
        processor_resizes: the processor resizes frames and images itself; otherwise they come in
            the plan's size.
        writes_timestamps: the processor writes the time of each temporal patch into the prompt.
    """

    geometry: Callable[[Any], Geometry]
    encode_vision: Callable[[Any, int, torch.Tensor, torch.Tensor], Iterator[torch.Tensor]]
    processor_resizes: bool = False
    writes_timestamps: bool = False


def has_vision_tower(config: Any) -> bool:
    """Whether a configuration is that of a model with a vision tower."""
    return hasattr(config, "vision_config")


def generation_class(config: Any) -> Any | None:
    """Return the transformers class that generates text with a configuration; None without one."""
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if has_vision_tower(config):
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping.get(type(config), None)  # this mapping's `get` has no default value


def unsupported_reason(config: Any, model_class: Any | None) -> str | None:
    """Return why a model is not supported, as a predicate ("generates no text"); None if it is.

    What a configuration does not state is found by `architecture_check`.
    """
    text = config.get_text_config()
    if model_class is None:
        return "generates no text"
    if config.is_encoder_decoder:
        return "has an encoder for its prompts; only decoder-only models are supported"
    other_layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if other_layers:
        names = ", ".join(sorted(other_layers))
        return f"has layers of {names}; only full_attention is supported"
    if not hasattr(text, "layer_types") and (window := sliding_window_of(text)):
        return f"has a sliding window of {window} tokens; only full attention is supported"
    # others than BERT's kin have `is_decoder` without meaning
    if hasattr(text, "add_cross_attention") and not getattr(text, "is_decoder", True):
        return "attends in both directions; only causal attention is supported"
    if not model_class._supports_attention_backend:
        return (
            "has its own attention code, which transformers' AttentionInterface cannot replace"
            f" (_supports_attention_backend of {model_class.__name__} is false)"
        )
    if reason := _rope_reason(_rope_types(text)):
        return reason
    if has_vision_tower(config) and config.model_type not in FAMILIES:
        return f"is none of the supported Video-LLMs: {', '.join(FAMILIES)}"
    return None


def unattachable_reason(hf: Any) -> str | None:
    """Return why a loaded model is not supported, as a predicate; None if it is.

    Nothing is run. What this does not show is found by `architecture_check`.
    """
    if not isinstance(hf, PreTrainedModel):
        return (
            "is no transformers model (PreTrainedModel); of a PEFT model, give"
            " model.get_base_model()"
        )
    if not hf.can_generate():
        return (
            f"generates no text: {type(hf).__name__} has no output head for tokens; load it with"
            " AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    if reason := unsupported_reason(hf.config, type(hf)):
        return reason
    decoder = hf.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return (
            f"keeps its layers elsewhere than in `layers` of its text stack"
            f" ({type(decoder).__name__}), where drafts expect them"
        )
    if reason := _rope_reason(_rope_types_of_modules(decoder)):
        return reason
    if not isinstance(getattr(hf.get_output_embeddings(), "out_features", None), int):
        return "has no linear output head"
    if not isinstance(getattr(hf.get_input_embeddings(), "embedding_dim", None), int):
        return "has no embedding of tokens"
    if any(parameter.is_meta for parameter in hf.parameters()):
        return "is offloaded: some of its weights are not on any device"
    return None


def _rope_reason(types: set[str]) -> str | None:
    """Return why RoPE of some types is not supported, as a predicate; None if all are."""
    if not (others := types - ROPE_TYPES):
        return None
    supported = ", ".join(sorted(ROPE_TYPES))
    if dependent := others & LENGTH_DEPENDENT_ROPE_TYPES:
        return (
            f"has RoPE of type {', '.join(sorted(dependent))}, whose frequencies change with the"
            f" longest position of a forward pass; supported types are {supported}"
        )
    return f"has RoPE of type {', '.join(sorted(others))}; supported types are {supported}"


def _rope_types(text: Any) -> set[str]:
    """Return the types in a configuration, which may have one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return set()
    by_layer_type = [part for part in parameters.values() if isinstance(part, dict)]
    parts = by_layer_type or [parameters]
    return {part.get("rope_type") or part.get("type") or "default" for part in parts}


def _rope_types_of_modules(decoder: nn.Module) -> set[str]:
    """Return the types that a text stack's modules were made with."""
    types = set[str]()
    for module in decoder.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            types.add(rope_type)
        elif isinstance(rope_type, dict):  # by type of layer
            types.update(rope_type.values())
    return types


def sliding_window_of(text: Any) -> int | None:
    """Return a text configuration's sliding window in tokens; None if it covers every context."""
    window = getattr(text, "sliding_window", None)
    return window if window and window < text.max_position_embeddings else None


# ----------------------------------------------------------------------------------------- geometry


def _per_frame_geometry(processor: Any) -> Geometry:
    """Geometry of Qwen2-VL and Qwen2.5-VL: a pixel budget per frame and one for the whole video.

    The latter is qwen-vl-utils' cap, nine tenths of 128,000 tokens' pixels, which takes effect
    above 300 full frames. Where a checkpoint does not set `cap_pixels_per_frame`, transformers
    omits the cap with a warning; here only an explicit `false` omits it.
    """
    video = processor.video_processor
    token_pixels = (video.patch_size * video.merge_size) ** 2
    capped = getattr(video, "cap_pixels_per_frame", None) is not False
    return Geometry(
        patch_size=video.patch_size,
        temporal_patch_size=video.temporal_patch_size,
        merge_size=video.merge_size,
        min_pixels=video.size["shortest_edge"],
        max_pixels=video.size["longest_edge"],
        total_pixels=int(video.max_video_tokens * token_pixels * 0.9) if capped else None,
    )


def _per_video_geometry(processor: Any) -> Geometry:
    """Geometry of Qwen3-VL: a pixel budget for the whole video, and the reference implementation's
    cap per frame (`cap_pixels_per_frame`).
    """
    video = processor.video_processor
    token_pixels = (video.patch_size * video.merge_size) ** 2
    return Geometry(
        patch_size=video.patch_size,
        temporal_patch_size=video.temporal_patch_size,
        merge_size=video.merge_size,
        min_pixels=token_pixels,
        max_pixels=video.max_video_tokens * token_pixels,
        video_pixels=video.size["longest_edge"],
    )


def _fixed_geometry(processor: Any) -> Geometry:
    """Geometry of LLaVA-OneVision: frames of one size, pooled 2 × 2, and one closing newline."""
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


def _encode_qwen(
    hf: Any, kind: int, patches: torch.Tensor, grid: torch.Tensor
) -> Iterator[torch.Tensor]:
    if kind == IMAGE:
        yield _qwen_features(hf.get_image_features, hf, patches, grid)
        return
    merge_size = hf.config.vision_config.spatial_merge_size
    for chunk, chunk_grid in _video_chunks(patches, grid, merge_size):
        yield _qwen_features(hf.get_video_features, hf, chunk, chunk_grid)


def _qwen_features(
    encode: Callable[..., Any], hf: Any, patches: torch.Tensor, grid: torch.Tensor
) -> torch.Tensor:
    """Encode one chunk; the features of the last layer and of each DeepStack level side by side."""
    output = encode(_to_model(hf, patches), grid.to(hf.device))
    levels = [output.pooler_output, *getattr(output, "deepstack_features", [])]
    return _concatenated([_concatenated(list(level)) for level in levels], dim=-1)


def _concatenated(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate, without a copy of a single tensor."""
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]


def _video_chunks(
    patches: torch.Tensor, grid: torch.Tensor, merge_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split videos between temporal patches, across which Qwen's towers do not attend.

    Yields:
        The patches of a chunk, and its grid (1, 3).
    """
    start = 0
    for times, height, width in grid.tolist():
        per_time = height * width
        max_times = max(1, VISION_CHUNK * merge_size**2 // per_time)
        for first in range(0, times, max_times):
            count = min(max_times, times - first)
            end = start + count * per_time
            yield patches[start:end], torch.tensor([[count, height, width]])
            start = end


def _encode_llava(
    hf: Any, kind: int, patches: torch.Tensor, grid: torch.Tensor
) -> Iterator[torch.Tensor]:
    if kind == IMAGE:
        output = hf.get_image_features(
            _to_model(hf, patches), grid.to(hf.device), batch_num_images=[len(grid)]
        )
        yield torch.cat(output.pooler_output)
        return
    for video in patches.split(grid[:, 0].tolist()):  # videos may differ in frames
        chunks = video.split(_llava_chunk_frames(hf))
        for chunk in chunks:
            features = hf.get_video_features(_to_model(hf, chunk)[None]).pooler_output[0]
            # every call appends the newline that belongs behind the whole video's last frame
            yield features if chunk is chunks[-1] else features[:-1]


def _llava_chunk_frames(hf: Any) -> int:
    """Return the frames of at most `VISION_CHUNK` tokens, after pooling 2 × 2."""
    vision = hf.config.vision_config
    side = math.ceil(vision.image_size // vision.patch_size / 2)
    return max(1, VISION_CHUNK // side**2)


def _to_model(hf: Any, patches: torch.Tensor) -> torch.Tensor:
    return patches.to(hf.device, hf.dtype)


FAMILIES = {
    "qwen2_vl": Family(_per_frame_geometry, _encode_qwen),
    "qwen2_5_vl": Family(_per_frame_geometry, _encode_qwen),
    "qwen3_vl": Family(_per_video_geometry, _encode_qwen, writes_timestamps=True),
    "llava_onevision": Family(_fixed_geometry, _encode_llava, processor_resizes=True),
}
