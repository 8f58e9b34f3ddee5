"""Models of real shapes with random weights, made on the device they run on: for speed, which does
not depend on what the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from std_core.model.model import Model


@dataclass(frozen=True)
class Shape:
    """A model's name and sizes, as its configuration has them."""

    name: str
    build: Callable[[dict[str, Any], dict[str, Any]], tuple[type[Any], Any]]
    text: dict[str, Any]
    vision: dict[str, Any]
    patch_numbers: int  # of one patch: channels × temporal patch × patch²


def _qwen2_vl(text: dict[str, Any], vision: dict[str, Any]) -> tuple[type[Any], Any]:
    return Qwen2VLForConditionalGeneration, Qwen2VLConfig(text_config=text, vision_config=vision)


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any]) -> tuple[type[Any], Any]:
    return Qwen3VLForConditionalGeneration, Qwen3VLConfig(text_config=text, vision_config=vision)


def _text(
    hidden: int, inner: int, layers: int, heads: tuple[int, int], words: int, rope: dict[str, Any]
) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": words,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, **rope},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


_DEEP: dict[str, Any] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}

FULL = (
    Shape(
        "Qwen2-VL-7B",
        build=_qwen2_vl,
        text=_text(3584, 18944, 28, (28, 4), words=152064, rope={"mrope_section": [16, 24, 24]}),
        vision={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "num_heads": 16,
            "mlp_ratio": 4,
        },
        patch_numbers=3 * 2 * 14**2,
    ),
    Shape(
        "Qwen3-VL-8B",
        build=_qwen3_vl,
        text=_text(4096, 12288, 36, (32, 8), words=151936, rope=_DEEP) | {"head_dim": 128},
        vision={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        patch_numbers=3 * 2 * 16**2,
    ),
)
TINY = (
    Shape(
        "tiny Qwen2-VL",
        build=_qwen2_vl,
        text=_text(64, 96, 1, (4, 2), words=96, rope={"mrope_section": [2, 3, 3]}),
        vision={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        patch_numbers=3 * 2 * 14**2,
    ),
)


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> Model:
    """Behind the engine's own adapter, ready to step."""
    kind, config = shape.build(shape.text, shape.vision)
    with torch.device(device):
        return Model(kind._from_config(config, dtype=dtype))


def small_llama(device: str, dtype: torch.dtype) -> Any:
    """A text model that says many different things, for checks of tokens against `generate`."""
    sizes = _text(64, 128, 2, (4, 2), words=96, rope={}) | {"initializer_range": 0.2}
    torch.manual_seed(5)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    return model.to(device, dtype).eval()
