"""Models of any size with random weights, of every kind that the engine drives: one builder for
tests and for the suites that measure times, memory or equality of tokens.

Imports nothing but PyTorch, transformers and the engine, for the suite `gpu`; processors are in
`tiny_models.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
}
MROPE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class TextSize:
    """Sizes of a text stack.

    Args:
        head_dim: hidden // heads if None.
        window: positions that the model takes.
        mrope_section: frequencies of the temporal, height and width axis, in families that have
            M-RoPE; half, a quarter and a quarter of them if None.
        initializer_range: standard deviation of the weights.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int | None = None
    window: int = 131072
    tied: bool = False  # output head and embedding are one matrix
    mrope_section: tuple[int, int, int] | None = None
    initializer_range: float = 0.02

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class VisionSize:
    """Sizes of a vision tower.

    Args:
        patch: pixels per side of a patch.
        window: pixels per side of Qwen2.5-VL's attention windows.
        positions: learned position embeddings of Qwen3-VL.
        deepstack: blocks of Qwen3-VL whose output is added behind the first text layers.
        image: pixels per side of LLaVA-OneVision's frames.
    """

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    patch: int = 14
    window: int = 112
    positions: int = 64
    deepstack: tuple[int, ...] = (0, 1)
    image: int = 112
    initializer_range: float = 0.02


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning of their own; those of text are None where nothing ends by itself."""

    image: int = 0
    video: int = 1
    vision_start: int = 2
    vision_end: int = 3
    eos: int | None = None
    pad: int | None = None


def config_of(
    family: str,
    text: TextSize,
    vision: VisionSize | None = None,
    tokens: SpecialTokens | None = None,
) -> Any:
    """A Hugging Face configuration of one of `CLASSES`; `vision` for those with a vision tower."""
    tokens = tokens or SpecialTokens()
    config_class, _ = CLASSES[family]
    text_config = _text_config(family, text, tokens)
    if vision is None:
        return config_class(**text_config)
    vision_config = _VISION_CONFIGS[family](text, vision)
    if family == "llava_onevision":
        return config_class(
            text_config={"model_type": "qwen2", **text_config},
            vision_config=vision_config,
            image_token_index=tokens.image,
            video_token_index=tokens.video,
            image_grid_pinpoints=image_grid_pinpoints(vision.image),
            tie_word_embeddings=text.tied,
        )
    return config_class(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=tokens.image,
        video_token_id=tokens.video,
        vision_start_token_id=tokens.vision_start,
        vision_end_token_id=tokens.vision_end,
        tie_word_embeddings=text.tied,
    )


def random_model(
    config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """A Hugging Face model with random weights, made on `device`; seeds PyTorch's generators."""
    model_class = next(model for kind, model in CLASSES.values() if type(config) is kind)
    torch.manual_seed(seed)
    with torch.device(device):
        hf = model_class._from_config(config, dtype=dtype)
    if config.get_text_config().tie_word_embeddings:
        hf.tie_weights()
    return hf.eval()


def image_grid_pinpoints(side: int) -> list[list[int]]:
    """LLaVA-OneVision's image sizes, in pixels: one or two frames high and wide."""
    return [[side * height, side * width] for height in (1, 2) for width in (1, 2)]


@dataclass(frozen=True)
class TokenIdCheckpoint:
    """In place of a `Checkpoint` for models without a tokenizer: prompts are token ids."""

    max_model_len: int = 131072
    supports_video: bool = False

    def decode(self, ids: list[int]) -> str:
        return ""


# ----------------------------------------------------------------------------------- configurations


def _text_config(family: str, text: TextSize, tokens: SpecialTokens) -> dict[str, Any]:
    return {
        "vocab_size": text.vocabulary,
        "hidden_size": text.hidden,
        "intermediate_size": text.intermediate,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_key_value_heads": text.kv_heads,
        "head_dim": text.head_size,
        "max_position_embeddings": text.window,
        "rope_parameters": {**ROPE, **_mrope(family, text)},
        "initializer_range": text.initializer_range,
        "tie_word_embeddings": text.tied,
        "bos_token_id": None,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    }


def _mrope(family: str, text: TextSize) -> dict[str, Any]:
    if family not in MROPE_FAMILIES:
        return {}
    frequencies = text.head_size // 2
    quarter = frequencies // 4
    section = text.mrope_section or (frequencies - 2 * quarter, quarter, quarter)
    interleaved = {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    return {"mrope_section": list(section), **interleaved}


def _qwen2_vl_vision(text: TextSize, vision: VisionSize) -> dict[str, Any]:
    return {
        "depth": vision.blocks,
        "embed_dim": vision.hidden,
        "hidden_size": text.hidden,
        "num_heads": vision.heads,
        "mlp_ratio": vision.intermediate // vision.hidden,
        "patch_size": vision.patch,
        "initializer_range": vision.initializer_range,
    }


def _qwen2_5_vl_vision(text: TextSize, vision: VisionSize) -> dict[str, Any]:
    return {
        **_qwen_vision(text, vision),
        "window_size": vision.window,
        "fullatt_block_indexes": [vision.blocks - 1],
        "tokens_per_second": 2,
    }


def _qwen3_vl_vision(text: TextSize, vision: VisionSize) -> dict[str, Any]:
    return {
        **_qwen_vision(text, vision),
        "num_position_embeddings": vision.positions,
        "deepstack_visual_indexes": list(vision.deepstack),
    }


def _qwen_vision(text: TextSize, vision: VisionSize) -> dict[str, Any]:
    """What the towers of Qwen2.5-VL and Qwen3-VL have in common."""
    return {
        "depth": vision.blocks,
        "hidden_size": vision.hidden,
        "num_heads": vision.heads,
        "intermediate_size": vision.intermediate,
        "out_hidden_size": text.hidden,
        "patch_size": vision.patch,
        "initializer_range": vision.initializer_range,
    }


def _llava_onevision_vision(text: TextSize, vision: VisionSize) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "num_hidden_layers": vision.blocks,
        "num_attention_heads": vision.heads,
        "image_size": vision.image,
        "patch_size": vision.patch,
        "vision_use_head": False,
    }


_VISION_CONFIGS = {
    "qwen2_vl": _qwen2_vl_vision,
    "qwen2_5_vl": _qwen2_5_vl_vision,
    "qwen3_vl": _qwen3_vl_vision,
    "llava_onevision": _llava_onevision_vision,
}
