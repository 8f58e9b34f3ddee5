"""Accuracy of the demo model: clips of 1 to 8 scenes are encoded as H.264, read back through the
frames stage, captioned and asked questions; the texts are compared with what was drawn.

With `--visual-tokens` the clips have 4 to 12 scenes, which last until each context has about that
many visual tokens."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from jobs.demo_model import world
from jobs.suites.shared.flags import parse_suite_flags, require_at_least
from jobs.suites.shared.timing import Stopwatch
from jobs.suites.shared.workload import raise_errors
from pipeline.command_line import flag
from pipeline.config import Job, draft_of, model_path
from pipeline.records import FrameOptions
from pipeline.video.frame_plan import plan_frames, smart_resize
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from std_core.engine.engine import Engine
from std_core.types import Geometry, Request, Result, Sampling

MAX_QUESTIONS = 9  # on a clip, besides the caption
MAX_SCENES = 8
MAX_TOKENS = 256
# clips with a given number of visual tokens
LONG_SCENES = (4, world.MAX_SCENES)
LONG_SIZE = (240, 240)  # pixels; resized to the demo model's largest frame
LONG_RATE = 2  # frames/s, all of them sampled

CAPTION = "caption_clause_accuracy"
ANSWER = "answer_accuracy"


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seed: int = flag(0, "of the clips and questions")
    clips: int = flag(200, "number of clips")
    visual_tokens: int | None = flag(None, "of each clip, about; default: short clips")
    model: str = flag("demo", "preset of conf/model or folder")
    draft: str = flag("std", "preset of conf/draft")
    mode: Literal["std", "dense"] = flag("std", "dense: without a draft")
    device: str = flag("cpu", "cpu or cuda")


@dataclass(frozen=True)
class Expected:
    """The truth about one request.

    Args:
        answer: empty for a caption.
    """

    scenes: tuple[world.Scene, ...]
    answer: str = ""


@dataclass
class Tally:
    """Right and counted clauses and answers, by (number of scenes, kind)."""

    right: Counter[tuple[int, str]] = field(default_factory=Counter)
    counted: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, expected: Expected, text: str) -> None:
        scenes = len(expected.scenes)
        if expected.answer:
            self.right[scenes, ANSWER] += text.strip() == expected.answer
            self.counted[scenes, ANSWER] += 1
        else:
            score = world.score_caption(expected.scenes, text)
            self.right[scenes, CAPTION] += score.right
            self.counted[scenes, CAPTION] += score.counted

    @property
    def scene_counts(self) -> list[int]:
        return sorted({scenes for scenes, _ in self.counted})

    def accuracy(self, kind: str, scenes: int | None = None) -> float:
        """Of clips with `scenes` scenes, or of all; 0 where nothing was counted."""
        keys = [key for key in self.counted if key[1] == kind and scenes in (None, key[0])]
        counted = sum(self.counted[key] for key in keys)
        return round(sum(self.right[key] for key in keys) / counted, 4) if counted else 0.0

    def accuracies(self, scenes: int | None = None) -> dict[str, float]:
        return {kind: self.accuracy(kind, scenes) for kind in (CAPTION, ANSWER)}


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "demo_quality", __doc__)
    require_at_least(flags, clips=1, visual_tokens=1)
    watch = Stopwatch()
    draft = draft_of(Job(draft=flags.draft, mode=flags.mode))
    engine = Engine.load(model_path(flags.model), device=flags.device)
    truth: dict[str, Expected] = {}
    tally = Tally()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        requests = _requests(flags, engine, truth, Path(folder))
        for result in raise_errors(engine.run(requests, draft)):
            tally.add(truth.pop(result.request_id), result.text)
            results.append(result)
    return _figures(flags, tally, results) | {"seconds": round(watch.seconds, 1)}


def _figures(flags: Flags, tally: Tally, results: list[Result]) -> dict[str, Any]:
    rounds = sum(r.rounds for r in results)
    accepted = sum(r.accepted for r in results)
    return {
        **tally.accuracies(),
        "by_scenes": {str(scenes): tally.accuracies(scenes) for scenes in tally.scene_counts},
        "clips": flags.clips,
        "seed": flags.seed,
        "requests": len(results),
        "accepted_per_round": round(accepted / rounds, 4) if rounds else 0.0,
        "visual_tokens": round(sum(r.num_visual_tokens for r in results) / len(results), 1),
        "kv_keep": round(sum(r.kv_keep for r in results) / len(results), 4),
    }


def _requests(
    flags: Flags, engine: Engine, truth: dict[str, Expected], folder: Path
) -> Iterator[Request]:
    """Caption and questions, clip by clip as the engine takes them.

    Args:
        truth: by `request_id`; filled with each request.
    """
    rng = random.Random(f"demo_quality {flags.seed}")
    for number in range(flags.clips):
        clip = draw_clip(rng, flags.visual_tokens, engine.checkpoint.geometry)
        path = folder / f"{number}.mp4"
        path.write_bytes(clip.data)
        frames, fps = _read_frames(str(path), engine, every_frame=flags.visual_tokens is not None)
        path.unlink()
        questions = world.questions(clip.scenes)
        asked = rng.sample(questions, min(MAX_QUESTIONS, len(questions)))
        prompts = [(world.CAPTION_PROMPTS[0], ""), *asked]
        for index, (prompt, answer) in enumerate(prompts):
            request_id = f"{number}/{index}"
            truth[request_id] = Expected(clip.scenes, answer)
            yield Request(
                request_id,
                prompt=prompt,
                frames=frames,
                video_id=str(number),
                fps=fps,
                sampling=Sampling(MAX_TOKENS),
            )


def draw_clip(
    rng: random.Random, visual_tokens: int | None, geometry: Geometry
) -> world.EncodedClip:
    """A short clip, or one whose scenes are repeated until its frames have about `visual_tokens`
    tokens."""
    seed = rng.getrandbits(48)
    if visual_tokens is None:
        return world.make_clip(seed, rng.randint(1, MAX_SCENES))
    scenes = rng.randint(*LONG_SCENES)
    height, width = smart_resize(
        *LONG_SIZE, geometry.factor, geometry.min_pixels, geometry.max_pixels
    )
    frames_per_scene = int(world.SCENE_SECONDS * LONG_RATE)
    tokens_without_repeats = scenes * geometry.tokens(frames_per_scene, height, width)
    repeats = max(1, round(visual_tokens / tokens_without_repeats))
    return world.make_clip(seed, scenes, LONG_SIZE, LONG_RATE, repeats=repeats)


def _read_frames(uri: str, engine: Engine, *, every_frame: bool) -> tuple[torch.Tensor, float]:
    """Frames and their rate, sampled as a job does it, or all of them."""
    info = probe(uri)
    options = FrameOptions(nframes=info.frames) if every_frame else FrameOptions()
    frames = decode(uri, info, plan_frames(info, options, engine.checkpoint.geometry))
    return torch.from_numpy(frames.pixels), frames.fps
