"""The models that the suite `gpu` measures: real sizes with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jobs.suites.shared.random_models import (
    TextSize,
    VisionSize,
    config_of,
    random_model,
)
from std_core.model.model import Model

CHANNELS = 3
TEMPORAL_PATCH = 2  # frames


@dataclass(frozen=True)
class Shape:
    """A Video-LLM's name and sizes."""

    name: str
    family: str
    text: TextSize
    vision: VisionSize

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels × frames × pixels."""
        return CHANNELS * TEMPORAL_PATCH * self.vision.patch**2


FULL = (
    Shape(
        "Qwen2-VL-7B",
        family="qwen2_vl",
        text=TextSize(
            3584,
            18944,
            layers=28,
            heads=28,
            kv_heads=4,
            vocabulary=152064,
            window=262144,
            mrope_section=(16, 24, 24),
        ),
        vision=VisionSize(1280, 5120, blocks=32, heads=16),
    ),
    Shape(
        "Qwen3-VL-8B",
        family="qwen3_vl",
        text=TextSize(
            4096,
            12288,
            layers=36,
            heads=32,
            kv_heads=8,
            vocabulary=151936,
            window=262144,
            mrope_section=(24, 20, 20),
        ),
        vision=VisionSize(
            1152, 4304, blocks=27, heads=16, patch=16, positions=2304, deepstack=(8, 16, 24)
        ),
    ),
)
TINY = (
    Shape(
        "tiny Qwen2-VL",
        family="qwen2_vl",
        text=TextSize(
            64, 96, layers=1, heads=4, kv_heads=2, vocabulary=96, mrope_section=(2, 3, 3)
        ),
        vision=VisionSize(32, 64, blocks=1, heads=2),
    ),
)
SMALL_LLAMA = TextSize(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=96, initializer_range=0.2)


def random_shape(shape: Shape, device: str, dtype: torch.dtype) -> Model:
    """A model of this shape behind the engine's adapter."""
    config = config_of(shape.family, shape.text, shape.vision)
    return Model(random_model(config, dtype=dtype, device=device), owns_weights=True)


def small_llama(device: str, dtype: torch.dtype) -> Any:
    """A small text model whose greedy tokens vary, for comparison with `generate`.

    The weights are drawn in float32 on the CPU, so that they are the same on every device.
    """
    return random_model(config_of("llama", SMALL_LLAMA), seed=5).to(device, dtype)
