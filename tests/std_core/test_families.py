"""Which architectures are refused, and that no weight is read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from std_core.checkpoint import Checkpoint
from std_core.families import refusal, writer_of

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "sliding by layers": (Gemma2Config(), "layers of sliding_attention"),
    "sliding throughout": (MistralConfig(sliding_window=4096), "a sliding window of 4096 tokens"),
    "sliding above some layer": (
        Qwen2Config(use_sliding_window=True, sliding_window=512, max_window_layers=2),
        "layers of sliding_attention",
    ),
    "linear by layers": (Qwen3NextConfig(), "layers of linear_attention"),
    "no attention": (MambaConfig(), "layers of linear_attention"),
    "own attention": (BloomConfig(), "an attention of its own"),
    "both directions": (BertConfig(), "in both directions"),
    "encoder and decoder": (T5Config(), "writes no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_driven_is_refused_from_its_configuration(case: str, tmp_path: Path) -> None:
    config, why = REFUSED[case]
    config.save_pretrained(tmp_path)  # nothing else lies there: neither tokenizer nor weights are asked for
    with pytest.raises(ValueError) as caught:
        Checkpoint.load(str(tmp_path))
    assert why in str(caught.value) and config.model_type in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(),
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=8192, max_position_embeddings=8192),  # a window that cuts nothing off
    ],
)
def test_what_can_be_driven_is_not(config: Any) -> None:
    assert refusal(config, writer_of(config)) is None
