from __future__ import annotations

from transformers import LlamaConfig, Qwen2VLConfig, Qwen3MoeConfig

from std_core.cost_model.model_size import ModelSize
from std_core.model.checkpoint import full_model_size
from std_core.types import Draft

LLAMA = ModelSize.of(
    LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
)


def test_a_draft_step_reads_the_bytes_it_keeps() -> None:
    whole = LLAMA.step_bytes([1000, 3000])
    assert whole == LLAMA.projection_bytes + LLAMA.head_bytes + 4000 * LLAMA.entry_bytes
    assert LLAMA.step_bytes([1000, 1000], shared=[2000]) == whole
    assert LLAMA.weights_read(Draft("full")) == LLAMA.weights_read()
    assert LLAMA.weights_read(Draft("full", weights="int8")) == LLAMA.weights_read() / 2
    half = Draft("full", depth=0.5)
    expected = LLAMA.projection_bytes / 2 + LLAMA.head_bytes + 500 * LLAMA.entry_bytes
    assert LLAMA.step_bytes([1000], half) == expected
    sparse = Draft("full", channels=0.5)
    expected = 0.92 * LLAMA.projection_bytes + LLAMA.head_bytes
    assert LLAMA.weights_read(sparse, rows=4, union_fraction=0.92) == expected


def test_only_active_experts_are_read() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=3,
        vocab_size=100,
    )
    size = ModelSize.of(config)
    assert size.projections == 64 * 16 * 2 * (4 + 2) + 2 * 3 * 64 * 32 + 64 * 16


def test_a_video_models_size_is_that_of_its_text_stack() -> None:
    config = Qwen2VLConfig()
    text = config.get_text_config()
    size = ModelSize.of(config)
    assert size.layers == text.num_hidden_layers and size.hidden == text.hidden_size


def test_parameters_are_counted_without_loading_weights() -> None:
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 14,
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
        },
        tie_word_embeddings=True,
    )
    size = full_model_size(config, 2, 2)
    assert size.tower_width == 32 and size.patches == 4
    assert 0 < size.tower < size.parameters
    assert size.parameters - size.tower > size.layers * size.projections
