"""Models of real shapes with random weights, for times alone: nothing is downloaded, and what
drafts are accepted means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from jobs.suites.acceptance.subjects import Subject
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.types import Request, Sampling

# text stacks: of SmolLM2-135M, Qwen2-VL-2B and -7B, Qwen3-VL-8B
SHAPES: dict[str, Any] = {
    "smollm2_shape": (LlamaConfig, (576, 1536, 30, 9, 3, 49152)),
    "qwen2_vl_2b_shape": (Qwen2Config, (1536, 8960, 28, 12, 2, 151936)),
    "qwen2_vl_7b_shape": (Qwen2Config, (3584, 18944, 28, 28, 4, 152064)),
    "qwen3_vl_8b_shape": (Qwen3Config, (4096, 12288, 36, 32, 8, 151936)),
}
SELECTED = 64  # of a prompt's last tokens that a draft always sees


@dataclass(frozen=True)
class Shaped:
    """In place of a checkpoint: prompts are ids."""

    max_model_len: int = 131072
    supports_video: bool = False

    def decode(self, ids: list[int]) -> str:
        return ""


def engine(name: str, dtype: str, device: str) -> Engine:
    """An engine of such a model."""
    kind, (hidden, inner, layers, heads, kv_heads, vocabulary) = SHAPES[name]
    config = kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=Shaped.max_model_len,
        tie_word_embeddings=True,
    )
    was = torch.get_default_dtype()
    rng = torch.random.get_rng_state()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        torch.manual_seed(0)
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(was)
        torch.random.set_rng_state(rng)
    return Engine(Model(hf), Shaped(), keep_prefixes=True)  # type: ignore[arg-type]


def subject(shaped: Engine, context: int, batch: int, tokens: int) -> Subject:
    """Prompts of random tokens."""
    rng = torch.Generator().manual_seed(0)
    sampling = Sampling(tokens, min_tokens=tokens, temperature=0.0)
    found = Subject([], {}, {})
    for number in range(batch):
        ids = torch.randint(shaped.model.vocab_size, (1, context), generator=rng)
        name = f"random {number}"
        found.requests.append(Request(name, "", video_id=name, sampling=sampling))
        found.inputs[name] = ModelInputs(ids, torch.zeros_like(ids))
    return found
