"""A tiny random model of every causal language model class of the installed transformers.

Configurations are shrunk by the names of their attributes, which most architectures share. What
this does not build is listed with the reason in `NOT_BUILT`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
WINDOW = 256
MAX_PARAMETERS = 8_000_000
# Wide enough that the likeliest token changes from step to step.
WEIGHT_STD = 0.3

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        (
            *("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size", "emb_dim"),
            *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dim_ff", "embed_dim"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "mamba_d_ssm"),
        ),
        32,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"),
            *("expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"),
        ),
        16,
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
            *("decoder_layers", "num_encoder_layers", "num_decoder_layers"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads"),
            *("encoder_attention_heads", "decoder_attention_heads"),
            *("num_encoder_attention_heads", "num_decoder_attention_heads"),
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), 2
    ),
    **dict.fromkeys(("head_dim", "attention_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), WINDOW),
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "is_decoder": True,
    "num_nextn_predict_layers": 0,
}
# By model type: what the shared names do not fit.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"num_hidden_layers": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": _MAMBA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, **_LINEAR_THEN_FULL},
    "inkling2_text": {
        "rel_extent": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "unpadded_vocab_size": VOCABULARY,
    },
    "kimi_linear": {"num_hidden_layers": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "qwen3_next": _LINEAR_THEN_FULL,
    "qwen3_5_text": _LINEAR_THEN_FULL,
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_BUILT = {
    "BltForCausalLM": "its byte patcher and its hash embeddings have sizes of their own",
    "CohereCompassForCausalLM": "its layers need RoPE parameters by layer type",
    "Gemma3nForCausalLM": "layers that share KV caches need at least a whole period of layer types",
    "Gemma3nForConditionalGeneration": "its vision tower needs timm",
    "Gemma4AssistantForCausalLM": "drafts for another model and does not run alone",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model and does not run alone",
    "Inkling2LoopForCausalLM": "its generate fails at this size",
    "KimiLinearForCausalLM": "lists its full attention layers in a nested configuration",
    "MusicgenForCausalLM": "its prompts are rows of audio codebooks",
    "MusicgenMelodyForCausalLM": "its prompts are rows of audio codebooks",
    "Qwen4ExpForCausalLM": "its generate fails at this size",
    "Zamba2ForCausalLM": "lists its layers in an attribute of its own",
    "ZambaForCausalLM": "lists its layers in an attribute of its own",
    "xLSTMForCausalLM": "its generate fails at this size",
}


def class_names() -> list[str]:
    """Names of all classes, each once."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def tiny_config(name: str, **overrides: Any) -> Any:
    """Make a class's smallest configuration."""
    return _shrunk(getattr(transformers, name).config_class, overrides)


def tiny_model(name: str, config: Any) -> Any:
    """Make a model of a class with random weights.

    Raises:
        ValueError: it would have more than `MAX_PARAMETERS`.
    """
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        count = model_class(config).num_parameters()
    if count > MAX_PARAMETERS:
        raise ValueError(f"{name} would have {count} parameters")
    torch.manual_seed(0)
    hf = model_class(config).eval()
    for parameter in hf.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    return hf


def _shrunk(config_class: type[Any], overrides: dict[str, Any]) -> Any:
    names = set(inspect.signature(config_class).parameters)
    names |= set(getattr(config_class, "__dataclass_fields__", ()))
    values = {name: value for name, value in _SIZES.items() if name in names}
    if "layer_types" in names:
        values["layer_types"] = None  # as many as there are layers
    if {"kv_lora_rank", "num_key_value_heads"} <= names:
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]
    parts = {name for name in getattr(config_class, "sub_configs", ()) if name in names}
    default = config_class() if parts else None
    for name in parts:
        if (part := getattr(default, name)) is not None:
            values[name] = _shrunk(type(part), {}).to_dict()
    return config_class(**(values | _SPECIAL.get(config_class.model_type, {}) | overrides))
