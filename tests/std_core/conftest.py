"""An engine of the untrained model, the clips that are put to it, and the oracle of its answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import demo_world as world
from std_core.engine import Engine
from std_core.types import Request, Sampling


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Engine:
    return Engine.load(str(tiny_model), max_num_seqs=3)


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Seven clips of 1 to 6 scenes and different sizes, with outputs of different lengths."""
    asked = []
    for seed in range(7):
        rng = random.Random(seed)
        height, width = rng.choice(((84, 112), (112, 84), (84, 84)))
        frames = world.clip_frames(rng, world.draw_scenes(rng, 1 + seed % 6), height, width, rate=2)
        prompt = rng.choice(world.CAPTION_PROMPTS)
        asked.append(Request(f"r{seed}", prompt, torch.from_numpy(frames), sampling=Sampling(rng.randint(1, 40))))
    return asked


@pytest.fixture(scope="session")
def generate(tiny_model: Path) -> Callable[[Engine, Request], list[int]]:
    """Hugging Face's own greedy `generate`, one request at a time: the oracle."""
    hf = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)

    def oracle(engine: Engine, request: Request) -> list[int]:
        fed = engine.checkpoint.inputs(request)
        shown = {
            "pixel_values_videos": fed.video_patches,
            "video_grid_thw": fed.video_grid,
            "pixel_values": fed.image_patches,
            "image_grid_thw": fed.image_grid,
        }
        out = hf.generate(
            input_ids=fed.ids,
            attention_mask=torch.ones_like(fed.ids),
            mm_token_type_ids=fed.types,
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            **{name: tensor for name, tensor in shown.items() if tensor is not None},
        )
        return out[0, fed.ids.shape[1] :].tolist()

    return oracle
