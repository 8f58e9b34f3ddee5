"""Whole requests, vision and prefill included: questions on each of some videos, by our engine and
by Hugging Face's `generate`, which sees each video anew for each of them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from jobs.demo_model import world
from jobs.suites.acceptance.subjects import SIDE
from jobs.suites.shared import reference
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, Request, Sampling

VIDEOS = 4
QUESTIONS = 8
SCENES = 12


def measured(engine: Engine, context: int, draft: Draft) -> dict[str, Any]:
    """Seconds of both, their ratio, and what ours went into; all answers are compared.

    Args:
        context: visual tokens of each video.
    """
    asked = _requests(engine, context)
    inputs = {request.request_id: engine.checkpoint.preprocess(request) for request in asked}
    ours = replace(engine, max_num_seqs=VIDEOS, prefixes=None, keep_prefixes=False)
    began = time.perf_counter()
    results = {
        r.request_id: r for r in ours.run(asked, draft, lambda request: inputs[request.request_id])
    }
    our_s = time.perf_counter() - began
    began = time.perf_counter()
    same = 0
    for number in range(QUESTIONS):
        batch = [request for request in asked if request.request_id.endswith(f"/{number}")]
        texts = _theirs(
            engine, [inputs[request.request_id] for request in batch], batch[0].sampling.max_tokens
        )
        same += sum(
            results[request.request_id].token_ids
            == text[: len(results[request.request_id].token_ids)]
            for request, text in zip(batch, texts, strict=True)
        )
    their_s = time.perf_counter() - began
    return {
        "videos": VIDEOS,
        "questions": len(asked),
        "context": context,
        "draft": draft.policy,
        "seconds": round(our_s, 3),
        "hf_seconds": round(their_s, 3),
        "speedup_end_to_end": round(their_s / our_s, 3),
        "same_answers": same,
        **{
            f"{part}_s": round(sum(getattr(r, f"{part}_s") for r in results.values()), 3)
            for part in ("vision", "decode")
        },
    }


def _requests(engine: Engine, context: int) -> list[Request]:
    """Of every video the same questions, so that each of them makes a batch of one length."""
    asked = []
    numbers = random.Random(0).sample(range(4 * SCENES), QUESTIONS)
    for video in range(VIDEOS):
        rng = random.Random(f"questions {video}")
        story = world.draw_scenes(rng, SCENES)
        rate = 1
        while (
            engine.checkpoint.geometry.tokens(int(world.SCENE_SECONDS * rate) * SCENES, SIDE, SIDE)
            < context
        ):
            rate += 1
        frames = torch.from_numpy(world.clip_frames(rng, story, SIDE, SIDE, rate=rate))
        for number, place in enumerate(numbers):
            question, _ = world.questions(story)[place]
            sampling = Sampling(12, temperature=0.0)
            asked.append(
                Request(
                    f"{video}/{number}",
                    prompt=question,
                    frames=frames,
                    video_id=f"clip {video}",
                    sampling=sampling,
                )
            )
    return asked


def _theirs(engine: Engine, prompts: Sequence[ModelInputs], tokens: int) -> list[list[int]]:
    fed = reference.hf_batch(engine.model.hf, prompts)
    mask = torch.ones_like(fed["input_ids"])
    engine.model.restore_attention()
    try:
        out = engine.model.hf.generate(
            **fed, attention_mask=mask, do_sample=False, max_new_tokens=tokens
        )
    finally:
        engine.model.install_attention()
    return out[:, fed["input_ids"].shape[1] :].tolist()
