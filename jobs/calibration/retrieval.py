"""Whether a draft's own view contains what a question needs, for `--mode sparse`, where nothing
verifies its text: a model is asked for facts stated or shown once in a long context, by the dense
loop and by the draft alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from jobs.demo_model import world
from jobs.suites.shared import workload
from std_core.cost_model.profile import RetrievalScore
from std_core.engine.engine import Engine
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.types import Draft, Mode, Request, Sampling

CONTEXTS = 4
QUESTIONS = 8  # on each context
SCENES = 8
DOORS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")


@dataclass(frozen=True)
class Question:
    """A request, its inputs, and how a right answer begins."""

    request: Request
    inputs: ModelInputs
    answer: str


def draw_questions(checkpoint: Checkpoint, context: int) -> list[Question]:
    """Questions on contexts of at least `context` tokens.

    A Video-LLM is asked about one scene of a clip; a text model for the key of one of several
    doors, each stated once in prose.
    """
    draw = _scene_questions if checkpoint.supports_video else _key_questions
    return list(draw(checkpoint, context))


def measure_retrieval(
    engine: Engine, drafts: Sequence[Draft], context: int
) -> dict[Draft, RetrievalScore]:
    """Right answers of the dense loop and of each draft alone (`mode=sparse`)."""
    questions = draw_questions(engine.checkpoint, context)
    own = replace(engine, max_num_seqs=CONTEXTS, prefixes=None, keep_prefixes=True)
    dense = _count_right(own, questions, None)
    return {
        draft: RetrievalScore(context, len(questions), dense, _count_right(own, questions, draft))
        for draft in drafts
    }


def _count_right(engine: Engine, questions: Sequence[Question], draft: Draft | None) -> int:
    by_id = {question.request.request_id: question for question in questions}
    mode = cast(Mode, "dense" if draft is None else "sparse")
    results = engine.run(
        [question.request for question in questions],
        draft,
        lambda request: by_id[request.request_id].inputs,
        mode=mode,
    )
    return sum(
        result.text.strip().startswith(by_id[result.request_id].answer) for result in results
    )


def _scene_questions(checkpoint: Checkpoint, context: int) -> Iterator[Question]:
    for number in range(CONTEXTS):
        rng = random.Random(f"retrieval {number}")
        clip = workload.draw_clip(rng, checkpoint.geometry, SCENES, context)
        *of_scenes, _ = world.questions(clip.scenes)  # the last asks for the number of scenes
        for index, (prompt, answer) in enumerate(rng.sample(of_scenes, QUESTIONS)):
            request = Request(
                f"{number}/{index}",
                prompt=prompt,
                frames=clip.frames,
                video_id=f"retrieval {number}",
                sampling=Sampling(12, temperature=0.0),
            )
            yield Question(request, checkpoint.preprocess(request), answer)


def _key_questions(checkpoint: Checkpoint, context: int) -> Iterator[Question]:
    def encode(text: str) -> list[int]:
        return checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]

    prose = workload.build_workload(checkpoint, context, range(CONTEXTS), 8, stagger=0)
    for number, request in enumerate(prose.requests):
        rng = random.Random(f"keys {number}")
        ids = prose.inputs[request.request_id].ids[0].tolist()
        keys = {door: str(rng.randrange(1000, 10_000)) for door in DOORS}
        statements = [
            encode(f"\nThe key of the {door} door is {key}.\n") for door, key in keys.items()
        ]
        text = _interleave(ids, statements)
        for door, key in rng.sample(sorted(keys.items()), QUESTIONS):
            prompt = torch.tensor([text + encode(f"\nThe key of the {door} door is")])
            asked = Request(
                f"{number}/{door}",
                "",
                video_id=f"keys {number}",
                sampling=Sampling(8, temperature=0.0),
            )
            yield Question(asked, ModelInputs(prompt, torch.zeros_like(prompt)), key)


def _interleave(prose: list[int], statements: list[list[int]]) -> list[int]:
    """The prose in equal parts, each followed by one statement."""
    size = len(prose) // len(statements)
    text: list[int] = []
    for index, statement in enumerate(statements):
        text += prose[index * size : (index + 1) * size] + statement
    return text
