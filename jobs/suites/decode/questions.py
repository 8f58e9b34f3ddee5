"""Whole requests, vision and prefill included: several questions on each of a few videos, answered
by our engine, which encodes a video once, and by Hugging Face's `generate`, which encodes it anew
for each question."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.demo_model import world
from jobs.suites.shared import reference
from jobs.suites.shared.timing import Stopwatch
from jobs.suites.shared.workload import draw_clip
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, Request, Result, Sampling

VIDEOS = 4
QUESTIONS = 8  # on each video
SCENES = 12
QUESTIONS_PER_SCENE = 4
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class VideoQuestion:
    """`number`: of the question, the same on every video."""

    request: Request
    number: int


def time_questions(engine: Engine, context: int, draft: Draft) -> dict[str, Any]:
    """Seconds of our engine and of `generate`, their ratio, and the number of equal answers.

    Args:
        context: visual tokens of each video.
    """
    questions = _draw_questions(engine, context)
    inputs = {q.request.request_id: engine.checkpoint.preprocess(q.request) for q in questions}
    watch = Stopwatch()
    results = _run_engine(engine, questions, inputs, draft)
    engine_s = watch.seconds
    watch.reset()
    same = _count_same_answers(engine, questions, inputs, results)
    generate_s = watch.seconds
    return {
        "videos": VIDEOS,
        "questions": len(questions),
        "context": context,
        "draft": draft.policy,
        "seconds": round(engine_s, 3),
        "hf_seconds": round(generate_s, 3),
        "speedup_end_to_end": round(generate_s / engine_s, 3),
        "same_answers": same,
        "vision_s": round(sum(r.vision_s for r in results.values()), 3),
        "decode_s": round(sum(r.decode_s for r in results.values()), 3),
    }


def _run_engine(
    engine: Engine,
    questions: Sequence[VideoQuestion],
    inputs: Mapping[str, ModelInputs],
    draft: Draft,
) -> dict[str, Result]:
    own = replace(engine, max_num_seqs=VIDEOS, prefixes=None, keep_prefixes=False)
    requests = [question.request for question in questions]
    results = own.run(requests, draft, lambda request: inputs[request.request_id])
    return {result.request_id: result for result in results}


def _count_same_answers(
    engine: Engine,
    questions: Sequence[VideoQuestion],
    inputs: Mapping[str, ModelInputs],
    results: Mapping[str, Result],
) -> int:
    """Answers that `generate` begins with too; one batch per question, all videos together."""
    same = 0
    for number in range(QUESTIONS):
        names = [q.request.request_id for q in questions if q.number == number]
        texts = reference.generate_batch(
            engine.model, [inputs[name] for name in names], ANSWER_TOKENS
        )
        for name, text in zip(names, texts, strict=True):
            ours = results[name].token_ids
            same += ours == text[: len(ours)]
    return same


def _draw_questions(engine: Engine, context: int) -> list[VideoQuestion]:
    """The same questions on every video, so that each makes a batch of prompts of one length."""
    indices = random.Random(0).sample(range(QUESTIONS_PER_SCENE * SCENES), QUESTIONS)
    sampling = Sampling(ANSWER_TOKENS, temperature=0.0)
    questions = []
    for video in range(VIDEOS):
        rng = random.Random(f"questions {video}")
        clip = draw_clip(rng, engine.checkpoint.geometry, SCENES, context)
        of_clip = world.questions(clip.scenes)
        for number, index in enumerate(indices):
            prompt, _ = of_clip[index]
            request = Request(
                f"{video}/{number}",
                prompt=prompt,
                frames=clip.frames,
                video_id=f"clip {video}",
                sampling=sampling,
            )
            questions.append(VideoQuestion(request, number))
    return questions
