"""An engine with the untrained tiny model, requests about drawn clips, reference outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs.demo_model import world
from jobs.suites.shared import reference
from std_core.engine.engine import Engine
from std_core.types import Request, Sampling


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Engine:
    return Engine.load(str(tiny_model), max_num_seqs=3)


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Seven clips of 1 to 6 scenes and different sizes, with outputs of different lengths."""
    requests = []
    for seed in range(7):
        rng = random.Random(seed)
        height, width = rng.choice(((84, 112), (112, 84), (84, 84)))
        frames = world.clip_frames(rng, world.draw_scenes(rng, 1 + seed % 6), height, width, rate=2)
        prompt = rng.choice(world.CAPTION_PROMPTS)
        sampling = Sampling(rng.randint(1, 40))
        requests.append(Request(f"r{seed}", prompt, torch.from_numpy(frames), sampling=sampling))
    return requests


@pytest.fixture(scope="session")
def generate() -> Callable[[Engine, Request], list[int]]:
    """Hugging Face's own greedy `generate`, one request at a time: the reference."""
    return lambda engine, request: reference.generate(
        engine.model, engine.checkpoint.preprocess(request), request.sampling
    )


@pytest.fixture(scope="session")
def expected(
    engine: Engine, requests: list[Request], generate: Callable[[Engine, Request], list[int]]
) -> dict[str, list[int]]:
    """The reference tokens of `requests`, by request id."""
    return {r.request_id: generate(engine, r) for r in requests}
