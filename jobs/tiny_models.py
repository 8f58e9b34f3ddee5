"""Tiny untrained models of every family, with processors and tokenizers that are the real ones: for tests and for the
benchmark suites that ask whether drafting changes a token.

Their weights are drawn so that they don't say one token for ever, and that a draft that sees less is at times wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train_demo_model as trainer

WINDOW = 32768
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def build(family: str, folder: Path, seed: int = 5) -> Path:
    """Writes weights, tokenizer and processors of one of `FAMILIES` into `folder`, and returns it."""
    words = trainer.tokenizer()
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
    model = trainer.build("demo", words)
    config: Any = model.config
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    return model, trainer.processor(words)


_BUILDERS: dict[str, Callable[[PreTrainedTokenizerFast], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "llama": _llama,
    "qwen3": _qwen3,
}
FAMILIES = tuple(_BUILDERS)
