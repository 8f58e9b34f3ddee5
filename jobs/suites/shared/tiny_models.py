"""Tiny untrained models of every family, with processors and tokenizers that are the real ones: for
tests and for the benchmark suites that ask whether drafting changes a token.

Their weights are drawn so that they don't say one token for ever, and that a draft that sees less
is at times wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from jobs.demo_model import model as demo_model

WINDOW = 32768
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def save_tiny_model(family: str, folder: Path, seed: int = 5) -> Path:
    """Writes weights, tokenizer and processors of one of `FAMILIES` into `folder`, and returns
    it."""
    words = demo_model.tokenizer()
    torch.manual_seed(seed)
    model, processor = _BUILDERS[family](words)
    if not model.config.get_text_config().tie_word_embeddings:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text(words: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The text stack's sizes: 3 layers of 4 query and 2 KV heads."""
    return {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": WINDOW,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }


def _llama(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    return LlamaForCausalLM(LlamaConfig(**_text(words), rope_parameters=ROPE)), words


def _qwen3(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    return Qwen3ForCausalLM(Qwen3Config(**_text(words), rope_parameters=ROPE)), words


def _qwen2_vl(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    model = demo_model.build("demo", words)
    config: Any = model.config
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    return model, demo_model.processor(words)


def _qwen2_5_vl(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "window_size": 56,  # two merged patches: a frame holds several windows
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "initializer_range": 0.1,
    }
    text = {**_text(words), "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **_places(words), tie_word_embeddings=False
    )
    qwen2 = demo_model.processor(words)
    processor = Qwen2_5_VLProcessor(
        qwen2.image_processor, words, qwen2.video_processor, chat_template=demo_model.TEMPLATE
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_vl(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": 14,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.1,
    }
    rope = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={**_text(words), "rope_parameters": rope},
        vision_config=vision,
        **_places(words),
        tie_word_embeddings=False,
    )
    common: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 14}
    size = {
        "shortest_edge": 4 * 28 * 28,
        "longest_edge": 64 * 112 * 112,
    }  # of a whole video, all frames together
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(**common, size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}),
        words,
        Qwen3VLVideoProcessor(**common, size=size, max_video_tokens=16, cap_pixels_per_frame=True),
        chat_template=demo_model.TEMPLATE,
    )
    return Qwen3VLForConditionalGeneration(config), processor


def _llava_onevision(words: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    side = 56
    patches = 16
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": 14,
        "vision_use_head": False,
    }
    pinpoints = [[side * h, side * w] for h in (1, 2) for w in (1, 2)]
    places = _places(words)
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text(words), "rope_parameters": ROPE},
        vision_config=vision,
        image_token_index=places["image_token_id"],
        video_token_index=places["video_token_id"],
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
    )
    common: dict[str, Any] = {
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(**common, image_grid_pinpoints=pinpoints),
        words,
        LlavaOnevisionVideoProcessor(**common),
        num_image_tokens=patches,
        vision_feature_select_strategy="full",
        chat_template=demo_model.TEMPLATE,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


def _places(words: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Ids of the tokens that stand for, before and behind what is looked at."""
    names = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    return {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in names.items()
    }


_BUILDERS: dict[str, Callable[[PreTrainedTokenizerFast], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava_onevision": _llava_onevision,
    "llama": _llama,
    "qwen3": _qwen3,
}
FAMILIES = tuple(_BUILDERS)
