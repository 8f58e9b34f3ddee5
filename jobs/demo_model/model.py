"""The demo models: Qwen2-VL in two sizes, with their tokenizer and processors.

`demo` captions and answers; `demo_small`, with the same tokens and a vision tower of its own,
drafts for it (`--draft pair-demo`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from jobs.demo_model import world

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKEN_SIDE = 28  # pixels per side of a visual token: 2 × 2 patches of 14
MIN_PIXELS = 56 * 56
MAX_PIXELS = 112 * 112
WINDOW = 32768  # tokens
INITIALIZER_RANGE = 0.06
VOCABULARY = 640  # tokens at most; training the tokenizer ends with fewer

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "text": {
            "hidden_size": 192,
            "intermediate_size": 448,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        "vision": {"embed_dim": 128, "depth": 3, "num_heads": 4, "mlp_ratio": 3},
    },
    "demo_small": {
        "text": {
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
        "vision": {"embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 3},
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, which encodes any prompt; every word of the synthetic videos is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(_tokenizer_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=WINDOW,
    )


def _tokenizer_corpus() -> list[str]:
    """Captions, questions and answers; the order and the counts decide the token ids."""
    rng = random.Random(0)
    clips = [world.draw_scenes(rng, world.MAX_SCENES) for _ in range(400)]
    corpus = [world.caption(scenes) for scenes in clips]
    for scenes in clips[:40]:
        for question, answer in world.questions(scenes):
            corpus += [question, answer]
    for scenes in clips:
        for count in range(1, world.MAX_SCENES + 1):
            corpus += world.questions(scenes[:count])[-1]
    corpus += world.CAPTION_PROMPTS * 20
    corpus += ["user\n", "assistant\n"] * 50
    return corpus


def processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    """Hugging Face's Qwen2-VL processors at the demo models' frame size."""
    common: dict[str, Any] = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**common),
        tokenizer,
        Qwen2VLVideoProcessor(**common, cap_pixels_per_frame=False),
        chat_template=TEMPLATE,
    )


def build(shape: str, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """An untrained model of one of `SHAPES`, float32."""
    sizes = SHAPES[shape]
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    config = Qwen2VLConfig(
        text_config={
            **sizes["text"],
            "vocab_size": len(tokenizer),
            "max_position_embeddings": WINDOW,
            "initializer_range": INITIALIZER_RANGE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
            },
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            **sizes["vision"],
            "hidden_size": sizes["text"]["hidden_size"],
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    return model


def save(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    """Write a folder for `from_pretrained`: weights as safetensors, tokenizer, processors."""
    model.save_pretrained(output)
    processor(tokenizer).save_pretrained(output)
