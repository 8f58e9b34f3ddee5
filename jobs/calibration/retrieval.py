"""Whether a draft's own view holds what is asked for, where nothing verifies what it writes: a
model is asked for what was told or shown at one place of a long context, densely and by the draft
alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from jobs.demo_model import world
from jobs.suites.acceptance import subjects
from std_core.cost_model.profile import RetrievalScore
from std_core.engine.engine import Engine
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.types import Draft, Request, Sampling

# contexts, and questions on each
SUBJECTS = 4
ASKED = 8
SCENES = 8
DOORS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")


@dataclass(frozen=True)
class Question:
    """A request, its inputs and the answer that it begins with."""

    request: Request
    inputs: ModelInputs
    answer: str


def questions(checkpoint: Checkpoint, context: int) -> list[Question]:
    """What is in the k-th scene of a clip; of a text model what the key of one of several doors is,
    each told somewhere in prose of `context` tokens."""
    return list(
        _scenes(checkpoint, context) if checkpoint.supports_video else _keys(checkpoint, context)
    )


def measured(engine: Engine, drafts: list[Draft], context: int) -> dict[Draft, RetrievalScore]:
    """How many answers are right: of the dense loop, and of each draft alone (`mode=sparse`)."""
    asked = questions(engine.checkpoint, context)
    alone = replace(engine, max_num_seqs=SUBJECTS, prefixes=None, keep_prefixes=True)
    dense = _right(alone, asked, None)
    return {
        draft: RetrievalScore(context, len(asked), dense, _right(alone, asked, draft))
        for draft in drafts
    }


def _right(engine: Engine, asked: list[Question], draft: Draft | None) -> int:
    known = {question.request.request_id: question for question in asked}
    requests = [question.request for question in asked]
    mode = "dense" if draft is None else "sparse"
    results = engine.run(requests, draft, lambda r: known[r.request_id].inputs, mode=mode)  # type: ignore[arg-type]
    return sum(
        result.text.strip().startswith(known[result.request_id].answer) for result in results
    )


def _scenes(checkpoint: Checkpoint, context: int) -> Iterator[Question]:
    for number in range(SUBJECTS):
        rng = random.Random(f"retrieval {number}")
        story = world.draw_scenes(rng, SCENES)
        rate = 1
        while checkpoint.geometry.tokens(_count(rate), subjects.SIDE, subjects.SIDE) < context:
            rate += 1
        frames = torch.from_numpy(
            world.clip_frames(rng, story, subjects.SIDE, subjects.SIDE, rate=rate)
        )
        for place, (prompt, answer) in enumerate(rng.sample(world.questions(story)[:-1], ASKED)):
            sampling = Sampling(12, temperature=0.0)
            request = Request(
                f"{number}/{place}",
                prompt=prompt,
                frames=frames,
                video_id=f"retrieval {number}",
                sampling=sampling,
            )
            yield Question(request, checkpoint.preprocess(request), answer)


def _count(rate: int) -> int:
    """Frames of a clip."""
    return int(world.SCENE_SECONDS * rate) * SCENES


def _keys(checkpoint: Checkpoint, context: int) -> Iterator[Question]:
    def ids(text: str) -> list[int]:
        return checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = subjects.subject(checkpoint, context, range(SUBJECTS), 8, step=0)
    for number, request in enumerate(whole.requests):
        rng = random.Random(f"keys {number}")
        prose = whole.inputs[request.request_id].ids[0].tolist()
        keys = {door: str(rng.randrange(1000, 10_000)) for door in DOORS}
        told = [ids(f"\nThe key of the {door} door is {key}.\n") for door, key in keys.items()]
        step = len(prose) // len(told)
        parts = [prose[i * step : (i + 1) * step] + one for i, one in enumerate(told)]
        text = [token for part in parts for token in part]
        for door, key in rng.sample(sorted(keys.items()), ASKED):
            prompt = torch.tensor([text + ids(f"\nThe key of the {door} door is")])
            name = f"{number}/{door}"
            sampling = Sampling(8, temperature=0.0)
            asked = Request(name, "", video_id=f"keys {number}", sampling=sampling)
            yield Question(asked, ModelInputs(prompt, torch.zeros_like(prompt)), key)
