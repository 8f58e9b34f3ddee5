"""RoPE by type, position and prefill chunk, against Hugging Face's `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from std_core import sparse_to_dense
from std_core.model.checkpoint import Checkpoint
from std_core.model.families import LENGTH_DEPENDENT_ROPE_TYPES, ROPE_TYPES
from std_core.types import Draft

ORIGINAL = 32  # positions of the training before its extension
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXTENDED = {
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100.0},
    "linear": {"rope_theta": 100.0, "factor": 8.0},
    "llama3": {**EXTENDED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "yarn": EXTENDED,
    "dynamic": EXTENDED,
    "longrope": {**EXTENDED, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}
# Below, across and above the original length, in prompt and output.
LENGTHS = (11, ORIGINAL - 4, 3 * ORIGINAL)


def rope(rope_type: str) -> dict[str, Any]:
    return {"rope_type": rope_type, **PARAMETERS[rope_type]}


def llama(rope_type: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope(rope_type))).eval()


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `LENGTHS`, padded on the left, and their mask."""
    width = max(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES["vocab_size"], (len(LENGTHS), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


def assert_same_tokens(hf: Any, prefill_chunk: int) -> None:
    """Each row alone in `generate` gives its tokens among the others of our batch."""
    ids, mask = padded_batch()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    fast = sparse_to_dense(hf, Draft("random", k=4, gamma=3), prefill_chunk=prefill_chunk)
    together = fast.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(LENGTHS):
        alone = ids[row : row + 1, -length:]
        expected = hf.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(together[row : row + 1, -length - 12 :], expected)


def test_every_type_of_transformers_is_supported_or_refused_by_name() -> None:
    known = {"default", *ROPE_INIT_FUNCTIONS}
    assert known <= ROPE_TYPES | LENGTH_DEPENDENT_ROPE_TYPES
    assert known == set(PARAMETERS)


@pytest.mark.parametrize("prefill_chunk", [7, 2048])
@pytest.mark.parametrize("rope_type", sorted(ROPE_TYPES & set(PARAMETERS)))
def test_supported_types(rope_type: str, prefill_chunk: int) -> None:
    assert_same_tokens(llama(rope_type), prefill_chunk)


def test_a_factor_of_the_scores_by_position() -> None:
    """Ministral 3 scales its queries by their positions, which its RoPE parameters state."""
    parameters = {**rope("yarn"), "llama_4_scaling_beta": 0.5}
    torch.manual_seed(0)
    config = Ministral3Config(**SIZES, rope_parameters=parameters)
    assert_same_tokens(Ministral3ForCausalLM(config).eval(), prefill_chunk=7)


def test_types_by_layer_type() -> None:
    torch.manual_seed(0)
    layers = {"layer_types": ["full_attention"] * 2}
    parameters = {"full_attention": rope("linear"), "sliding_attention": rope("default")}
    config = Gemma3TextConfig(**SIZES, **layers, rope_parameters=parameters)
    assert_same_tokens(Gemma3ForCausalLM(config).eval(), prefill_chunk=7)
    refused = {"full_attention": rope("dynamic"), "sliding_attention": rope("default")}
    config = Gemma3TextConfig(**SIZES, **layers, rope_parameters=refused)
    with pytest.raises(ValueError, match="RoPE of type dynamic, whose frequencies change"):
        sparse_to_dense(Gemma3ForCausalLM(config))


@pytest.mark.parametrize("rope_type", sorted(LENGTH_DEPENDENT_ROPE_TYPES))
def test_types_that_depend_on_the_longest_position_are_refused(
    rope_type: str, tmp_path: Path
) -> None:
    reason = f"RoPE of type {rope_type}, whose frequencies change with the longest position"
    hf = llama(rope_type)
    with pytest.raises(ValueError, match=reason):
        sparse_to_dense(hf)
    hf.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        Checkpoint.load(str(tmp_path))
    # a configuration that was changed after the model was made from it
    hf.config.rope_parameters = rope("default")
    with pytest.raises(ValueError, match=reason):
        sparse_to_dense(hf)


def test_the_older_name_of_the_parameters_is_read() -> None:
    hf = LlamaForCausalLM(LlamaConfig(**SIZES, rope_scaling={"type": "dynamic", "factor": 2.0}))
    with pytest.raises(ValueError, match="RoPE of type dynamic"):
        sparse_to_dense(hf)


def test_an_unknown_type_is_refused() -> None:
    hf = llama("default")
    hf.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(
        ValueError, match="RoPE of type spiral; supported types are default, linear"
    ):
        sparse_to_dense(hf)
