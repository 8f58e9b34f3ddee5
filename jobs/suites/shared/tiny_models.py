"""Tiny models of every family with random weights and real processors and tokenizers: for tests,
and for the suites that compare tokens.

The weights are wide enough that greedy texts are not one repeated token, and that sparse drafts are
sometimes rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from jobs.demo_model import model as demo_model
from jobs.suites.shared.random_models import (
    SpecialTokens,
    TextSize,
    VisionSize,
    config_of,
    image_grid_pinpoints,
    random_model,
)

SEED = 5
CENTRED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # pixels to -1 … 1
QWEN2_5_VISION = VisionSize(
    hidden=32,
    intermediate=64,
    blocks=2,
    heads=2,
    window=56,  # two merged patches: a frame has several windows
    initializer_range=0.1,
)
QWEN3_VISION = VisionSize(hidden=32, intermediate=64, blocks=3, heads=2, initializer_range=0.1)
LLAVA_VISION = VisionSize(hidden=32, intermediate=64, blocks=2, heads=2, image=56)


def save_tiny_model(family: str, folder: Path, seed: int = SEED) -> Path:
    """Write weights, tokenizer and processors of one of `FAMILIES`; returns `folder`."""
    tokenizer = demo_model.tokenizer()
    model = _build_model(family, tokenizer, seed)
    if not model.config.get_text_config().tie_word_embeddings:
        # a wide output head, so that the likeliest token changes from step to step
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    model.save_pretrained(folder)
    _PROCESSORS[family](tokenizer).save_pretrained(folder)
    return folder


def _build_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    if family == "qwen2_vl":
        return _untied_demo_model(tokenizer, seed)
    config = config_of(family, _text_size(tokenizer), _VISION.get(family), _tokens(tokenizer))
    return random_model(config, seed=seed)


def _untied_demo_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """The demo model's sizes, random weights and an output head of its own."""
    torch.manual_seed(seed)
    model = demo_model.build("demo", tokenizer)
    config: Any = model.config
    config.tie_word_embeddings = False
    config.text_config.tie_word_embeddings = False
    return model


def _text_size(tokenizer: PreTrainedTokenizerFast) -> TextSize:
    return TextSize(
        hidden=64,
        intermediate=128,
        layers=3,
        heads=4,
        kv_heads=2,
        vocabulary=len(tokenizer),
        window=32768,
        initializer_range=0.2,
    )


def _tokens(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    def token_id(name: str) -> Any:
        return tokenizer.convert_tokens_to_ids(f"<|{name}|>")

    return SpecialTokens(
        image=token_id("image_pad"),
        video=token_id("video_pad"),
        vision_start=token_id("vision_start"),
        vision_end=token_id("vision_end"),
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
    )


# --------------------------------------------------------------------------------------- processors


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> Any:
    qwen2 = demo_model.processor(tokenizer)
    return Qwen2_5_VLProcessor(
        qwen2.image_processor, tokenizer, qwen2.video_processor, chat_template=demo_model.TEMPLATE
    )


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> Any:
    common: dict[str, Any] = {**CENTRED, "patch_size": QWEN3_VISION.patch}
    # pixels of a whole video, all frames together
    video_size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 112 * 112}
    image_size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**common, size=image_size),
        tokenizer,
        Qwen3VLVideoProcessor(
            **common, size=video_size, max_video_tokens=16, cap_pixels_per_frame=True
        ),
        chat_template=demo_model.TEMPLATE,
    )


def _llava_onevision(tokenizer: PreTrainedTokenizerFast) -> Any:
    side = LLAVA_VISION.image
    common: dict[str, Any] = {**CENTRED, "size": {"height": side, "width": side}}
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(**common, image_grid_pinpoints=image_grid_pinpoints(side)),
        tokenizer,
        LlavaOnevisionVideoProcessor(**common),
        num_image_tokens=(side // LLAVA_VISION.patch) ** 2,
        vision_feature_select_strategy="full",
        chat_template=demo_model.TEMPLATE,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )


def _tokenizer_alone(tokenizer: PreTrainedTokenizerFast) -> Any:
    return tokenizer


_VISION = {
    "qwen2_5_vl": QWEN2_5_VISION,
    "qwen3_vl": QWEN3_VISION,
    "llava_onevision": LLAVA_VISION,
}
_PROCESSORS: dict[str, Callable[[PreTrainedTokenizerFast], Any]] = {
    "qwen2_vl": demo_model.processor,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava_onevision": _llava_onevision,
    "llama": _tokenizer_alone,
    "qwen3": _tokenizer_alone,
}
FAMILIES = tuple(_PROCESSORS)
