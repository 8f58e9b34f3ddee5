"""The demo models: Qwen2-VL at the size of the world of `demo_world.py`, their tokenizer and
processors.

`demo` is what captions; `demo_small`, with the same tokens and a vision tower of its own, drafts
for it."""

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

SPECIAL = (
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
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGED = 28  # pixels a side of one visual token: patch 14, merged 2 × 2
MAX_PIXELS = 112 * 112

SHAPES = {
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
    """Byte-level BPE, so that any prompt can be written; every word of the world is one token."""
    rng = random.Random(0)
    stories = [world.draw_scenes(rng, world.MAX_SCENES) for _ in range(400)]
    corpus = [world.caption(s) for s in stories] + [
        text for s in stories[:40] for pair in world.questions(s) for text in pair
    ]
    corpus += [q for s in stories for n in range(1, 13) for q in world.questions(s[:n])[-1]]
    corpus += [*world.CAPTION_PROMPTS * 20, *["user\n", "assistant\n"] * 50]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=list(SPECIAL),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=32768,
    )


def processor(words: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    """Hugging Face's own Qwen2-VL processors at the demo model's frame size."""
    size = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    common: dict[str, Any] = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**common),
        words,
        Qwen2VLVideoProcessor(**common, cap_pixels_per_frame=False),
        chat_template=TEMPLATE,
    )


def build(shape: str, words: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """An untrained model, float32."""
    sizes = SHAPES[shape]
    ids: dict[str, Any] = {name: words.convert_tokens_to_ids(name) for name in SPECIAL}
    config = Qwen2VLConfig(
        text_config={
            **sizes["text"],
            "vocab_size": len(words),
            "max_position_embeddings": 32768,
            "initializer_range": 0.06,
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
            "initializer_range": 0.06,
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
    model: Qwen2VLForConditionalGeneration, words: PreTrainedTokenizerFast, output: Path
) -> None:
    """Writes a folder that `from_pretrained` reads: weights as safetensors, tokenizer,
    processors."""
    model.save_pretrained(output)
    processor(words).save_pretrained(output)
