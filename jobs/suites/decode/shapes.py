"""Text models of real sizes with random weights, for times alone: nothing is downloaded, and their
acceptance means nothing."""

from __future__ import annotations

import torch

from jobs.suites.shared.random_models import TextSize, TokenIdCheckpoint, config_of, random_model
from jobs.suites.shared.workload import Workload
from std_core.engine.engine import Engine
from std_core.model.model import Model
from std_core.types import Sampling

# by name, the family and the text stack's sizes of SmolLM2-135M, Qwen2-VL-2B and -7B, Qwen3-VL-8B
SHAPES = {
    "smollm2_shape": (
        "llama",
        TextSize(576, 1536, layers=30, heads=9, kv_heads=3, vocabulary=49152, tied=True),
    ),
    "qwen2_vl_2b_shape": (
        "qwen2",
        TextSize(1536, 8960, layers=28, heads=12, kv_heads=2, vocabulary=151936, tied=True),
    ),
    "qwen2_vl_7b_shape": (
        "qwen2",
        TextSize(3584, 18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, tied=True),
    ),
    "qwen3_vl_8b_shape": (
        "qwen3",
        TextSize(4096, 12288, layers=36, heads=32, kv_heads=8, vocabulary=151936, tied=True),
    ),
}


def shape_engine(name: str, dtype: str, device: str) -> Engine:
    """An engine of one of `SHAPES`."""
    family, size = SHAPES[name]
    hf = random_model(config_of(family, size), dtype=getattr(torch, dtype), device=device)
    checkpoint = TokenIdCheckpoint(max_model_len=size.window)
    return Engine(Model(hf, owns_weights=True), checkpoint, keep_prefixes=True)  # type: ignore[arg-type]


def random_workload(engine: Engine, context: int, batch: int, max_tokens: int) -> Workload:
    """`batch` prompts of `context` random tokens."""
    rng = torch.Generator().manual_seed(0)
    sampling = Sampling(max_tokens, min_tokens=max_tokens, temperature=0.0)
    workload = Workload()
    for number in range(batch):
        ids = torch.randint(engine.model.vocab_size, (context,), generator=rng)
        workload.add_token_ids(f"random {number}", ids.tolist(), sampling)
    return workload
