"""Every causal language model class of the installed transformers, at a tiny size: the tokens of
its own `generate`, or a refusal in one sentence; and its `generate` works as before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.suites.shared import causal_lm_classes
from std_core import sparse_to_dense
from std_core.types import Draft

IDS = torch.randint(
    3, causal_lm_classes.VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(0)
)
NAMES = [
    name for name in causal_lm_classes.class_names() if name not in causal_lm_classes.NOT_BUILT
]
# Attention that is refused by the names of the layers alone: looked at once more with full
# attention in all of them, where the configuration takes that and `generate` runs.
FULL_ATTENTION = (
    *("AfmoeForCausalLM", "BeamForCausalLM", "Cohere2ForCausalLM", "CwmForCausalLM"),
    *("DoryForCausalLM", "Exaone4ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Gemma4ForCausalLM", "GptOssForCausalLM", "GraniteSWAForCausalLM", "Kolibri1ForCausalLM"),
    *("Lfm3ForCausalLM", "Llama4ForCausalLM", "MiMoV2FlashForCausalLM", "MiniMaxForCausalLM"),
    *("MinistralForCausalLM", "ModernBertDecoderForCausalLM", "Olmo3ForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "VaultGemmaForCausalLM"),
)
# Refused for a reason that must not change into another one unnoticed.
REASONS = {
    "AXK1ForCausalLM": "queries, keys and values of different sizes",
    "BertLMHeadModel": "keeps its layers elsewhere",
    "BloomForCausalLM": "its own attention code",
    "CTRLLMHeadModel": "keeps its layers elsewhere",
    "CodeGenForCausalLM": "keeps its layers elsewhere",
    "CohereForCausalLM": "changes its embeddings or its logits",
    "DeepseekV3ForCausalLM": "queries, keys and values of different sizes",
    "DiffLlamaForCausalLM": "does not call AttentionInterface exactly once",
    "DogeForCausalLM": "computes an attention mask of its own",
    "FlintForCausalLM": "learned attention sinks",
    "GPT2LMHeadModel": "keeps its layers elsewhere",
    "GPTBigCodeForCausalLM": "keeps its layers elsewhere",
    "GPTJForCausalLM": "keeps its layers elsewhere",
    "Gemma2ForCausalLM": "layers of sliding_attention",
    "LongcatFlashForCausalLM": "does not call AttentionInterface exactly once",
    "MambaForCausalLM": "layers of linear_attention",
    "NanoChatForCausalLM": "changes its embeddings or its logits",
    "NemotronForCausalLM": "does not pass keyword arguments on to its attention",
}
DRIVEN = (
    *("ApertusForCausalLM", "GPTNeoXForCausalLM", "GemmaForCausalLM", "GlmForCausalLM"),
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM"),
    *("Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
)


def own_tokens(hf: Any) -> torch.Tensor:
    return hf.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )


def refusal(name: str, config: Any) -> str | None:
    """Compare one class with its own `generate`; return why it is refused, None if it is not."""
    hf = causal_lm_classes.tiny_model(name, config)
    expected = own_tokens(hf)
    reason = None
    try:
        fast = sparse_to_dense(hf, Draft("random", k=2, gamma=3), prefill_chunk=7)
    except ValueError as error:
        reason = str(error)
        assert "\n" not in reason
        assert "does not run on our attention" not in reason, "its true reason is not known"
    else:
        ids = fast.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(ids, expected)
    assert torch.equal(own_tokens(hf), expected)
    return reason


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_generate_or_a_refusal(name: str) -> None:
    reason = refusal(name, causal_lm_classes.tiny_config(name))
    if name in REASONS:
        assert reason is not None and REASONS[name] in reason
    if name in DRIVEN:
        assert reason is None


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_the_same_with_full_attention_in_all_layers(name: str) -> None:
    layers = causal_lm_classes.tiny_config(name).num_hidden_layers
    config = causal_lm_classes.tiny_config(name, layer_types=["full_attention"] * layers)
    reason = refusal(name, config)
    assert reason is None or "layers of" not in reason


def test_classes_that_are_not_built_are_named_with_a_reason() -> None:
    assert set(causal_lm_classes.NOT_BUILT) <= set(causal_lm_classes.class_names())
    assert all(causal_lm_classes.NOT_BUILT.values())
    assert len(causal_lm_classes.NOT_BUILT) < len(NAMES) / 10
