"""Models and requests of any size, of every kind of Video-LLM, without a checkpoint: for what they
take of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model

KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
}
PATCH, MERGE, WORDS_KEPT = (
    14,
    2,
    8,
)  # pixels; patches a side of a visual token; ids that stand for what is seen


@dataclass(frozen=True)
class Sizes:
    """Of a model; the vision tower's where its kind has one."""

    family: str = "qwen2_vl"
    hidden: int = 256
    inner: int = 512
    layers: int = 4
    heads: tuple[int, int] = (4, 2)  # of queries, of keys and values; of 64 numbers each
    words: int = 512
    tower: tuple[int, int, int] = (64, 128, 2)  # width, MLP's width, blocks
    side: int = 112  # pixels of a frame
    tied: bool = False


@dataclass(frozen=True)
class Asked:
    """What is asked: `frames` temporal patches of a video, text behind it, and what may be
    written."""

    frames: int
    text: int
    written: int

    def visual(self, sizes: Sizes) -> int:
        """Visual tokens."""
        if sizes.family == "llama":
            return 0
        side = sizes.side // PATCH // MERGE
        return self.frames * side**2 + int(sizes.family == "llava_onevision")


def config_of(sizes: Sizes) -> Any:
    """A Hugging Face configuration."""
    text = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads[0],
        "num_key_value_heads": sizes.heads[1],
        "head_dim": 64,
        "vocab_size": sizes.words,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **_axes(sizes.family)},
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    kind, _ = KINDS[sizes.family]
    if sizes.family == "llama":
        return kind(**text)
    return kind(
        text_config=text, vision_config=_tower(sizes), **_places(), tie_word_embeddings=sizes.tied
    )


def build(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> Model:
    """Behind the engine's adapter; of random weights."""
    _, kind = KINDS[sizes.family]
    torch.manual_seed(0)
    with torch.device(device):
        hf = kind._from_config(config_of(sizes), dtype=dtype)
    if sizes.tied:
        hf.tie_weights()
    return Model(hf)


def inputs_of(sizes: Sizes, asked: Asked, seed: int = 0) -> ModelInputs:
    """A prompt of random words around a video of random patches."""
    rng = torch.Generator().manual_seed(seed)
    visual = asked.visual(sizes)
    side = sizes.side // PATCH
    parts = [(4, 0), (visual, 2), (asked.text - 4, 0)]
    if sizes.family == "qwen3_vl":  # each frame has its time before it
        parts = [
            *[(1, 0), (visual // asked.frames, 2)] * asked.frames,
            (asked.text - asked.frames, 0),
        ]
    types = torch.cat([torch.full((count,), kind) for count, kind in parts])[None]
    words = torch.randint(WORDS_KEPT, sizes.words, types.shape, generator=rng)
    ids = torch.where(types == 2, 1, words)
    if sizes.family == "llama":
        return ModelInputs(words, torch.zeros_like(types))
    if sizes.family == "llava_onevision":
        frames = torch.randn(asked.frames, 3, sizes.side, sizes.side, generator=rng)
        return ModelInputs(
            ids, types, frames, torch.tensor([[asked.frames, sizes.side, sizes.side]])
        )
    patches = torch.randn(asked.frames * side**2, 3 * 2 * PATCH**2, generator=rng)
    return ModelInputs(
        ids,
        token_types=types,
        video_patches=patches,
        video_grid=torch.tensor([[asked.frames, side, side]]),
        second_per_grid=torch.tensor([1.0]),
    )


def _axes(family: str) -> dict[str, Any]:
    if family in ("llama", "llava_onevision"):
        return {}
    return {"mrope_section": [12, 10, 10]} | (
        {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    )


def _places() -> dict[str, int]:
    return {
        "image_token_id": 0,
        "video_token_id": 1,
        "vision_start_token_id": 2,
        "vision_end_token_id": 3,
    }


def _tower(sizes: Sizes) -> dict[str, Any]:
    width, inner, depth = sizes.tower
    common: dict[str, Any] = {"patch_size": PATCH, "num_heads": width // 32, "depth": depth}
    if sizes.family == "qwen2_vl":
        return common | {
            "embed_dim": width,
            "hidden_size": sizes.hidden,
            "mlp_ratio": inner // width,
        }
    common |= {"hidden_size": width, "intermediate_size": inner, "out_hidden_size": sizes.hidden}
    if sizes.family == "qwen2_5_vl":
        return common | {"window_size": 112, "fullatt_block_indexes": [depth - 1]}
    if sizes.family == "qwen3_vl":
        return common | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 32,
        "image_size": sizes.side,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
