"""Loading, the architecture check, and text models against Hugging Face's `generate`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from std_core.engine.engine import Engine
from std_core.model.model import Model
from std_core.types import Draft, Request, Sampling

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **FULL)), "caps its attention scores"),
        (
            lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **FULL, num_local_experts=4)),
            "learned attention sinks",
        ),
        (
            lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
            "changes its embeddings or its logits",
        ),
    ],
)
def test_unsupported_attention_is_found_by_running_one_token(
    make: Callable[[], torch.nn.Module], reason: str
) -> None:
    hf: Any = make()
    before = hf.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        Model(hf)
    assert hf.config._attn_implementation == before


def test_missing_weights_are_an_error(families: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(families("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {k: v for k, v in weights.items() if k != missing},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match=f"lacks 1 weights, {missing}"):
        Engine.load(str(folder))


def test_unreadable_weights_are_an_error_of_one_line(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(families("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cannot be read") as cut:
        Engine.load(str(folder))
    weights.unlink()
    with pytest.raises(ValueError, match="cannot be read") as missing:
        Engine.load(str(folder))
    for caught in (cut, missing):
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def smollm2_engine(smollm2: Path) -> Engine:
    return Engine.load(str(smollm2), max_num_seqs=2)


@pytest.fixture(scope="module")
def prose() -> str:
    """About 490 tokens, 530 with the chat template."""
    return topics["exceptions"] + "\n\nWhat does this text say?"


@pytest.fixture(scope="module")
def expected(smollm2_engine: Engine, prose: str) -> list[int]:
    """Tokens of `generate`. Dequantizing the file once more would take longer than all else."""
    hf = smollm2_engine.model.hf
    tokenizer = smollm2_engine.checkpoint.tokenizer
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prose}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    return hf.generate(**inputs, max_new_tokens=24, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()


@pytest.mark.parametrize(
    "draft", [None, Draft("std", k=64), Draft("ngram"), Draft("full", gamma=3)]
)
def test_smollm2_tokens_equal_generates(
    smollm2_engine: Engine, prose: str, expected: list[int], draft: Draft | None
) -> None:
    sampling = Sampling(24)
    requests = [
        Request("long", prose, sampling=sampling),
        Request("short", "What is the capital of France?"),
    ]
    results = {r.request_id: r for r in smollm2_engine.run(requests, draft)}
    assert results["long"].token_ids == expected
    assert results["short"].text == "The capital of France is Paris."
    assert results["short"].finish_reason == "stop"
    if draft is not None and draft.policy == "full":
        assert [r.accepted for r in results.values()] == [r.proposed for r in results.values()]


def test_a_gguf_file_keeps_rope_parameters_and_tied_head(smollm2_engine: Engine) -> None:
    hf = smollm2_engine.model.hf
    assert hf.config.rope_parameters["rope_theta"] == 100_000
    assert hf.model.rotary_emb.inv_freq[1].item() == pytest.approx(100_000 ** (-2 / 64))
    assert hf.lm_head.weight.data_ptr() == hf.model.embed_tokens.weight.data_ptr()
    assert smollm2_engine.checkpoint.max_model_len == 8192


def test_without_an_eos_id_the_engine_does_not_stop_either(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    """A generation configuration without an EOS id: `generate` runs to its limit."""
    folder = shutil.copytree(families("llama"), tmp_path / "endless")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": 0}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    engine = Engine.load(str(folder))
    inputs = engine.checkpoint.preprocess(Request("a", "square"))
    hf = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = hf.generate(
        input_ids=inputs.ids,
        attention_mask=torch.ones_like(inputs.ids),
        max_new_tokens=40,
        do_sample=False,
    )
    (result,) = engine.run(
        [Request("a", "square", sampling=Sampling(40))], Draft("random", keep=0.2)
    )
    assert result.token_ids == out[0, inputs.ids.shape[1] :].tolist()
