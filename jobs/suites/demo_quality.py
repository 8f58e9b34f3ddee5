"""How right the demo model is: clips of 1 to 8 scenes, encoded as H.264 and read back through the
frames stage, are captioned and asked questions, and what it writes is compared with what was drawn.
With `--visual-tokens` the clips have 4 to 12 longer scenes, so that every context holds about that
many visual tokens."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from jobs.demo_model import world
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    Job,
    draft_of,
    model_path,
)
from pipeline.records import FrameOptions, UsageError
from pipeline.video.frame_plan import plan_frames, smart_resize
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from std_core.engine.engine import Engine
from std_core.types import Geometry, Request, Result, Sampling

QUESTIONS = 9  # asked of a clip at most, besides the caption
MAX_SCENES = 8
MAX_TOKENS = 256
LONG_SCENES = (4, world.MAX_SCENES)  # of a clip with a given number of visual tokens
LONG_SIZE = (240, 240)  # pixels; becomes the demo model's largest frame
LONG_RATE = 2  # frames a second, all of them sampled


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seed: int = 0
    clips: int = 200
    visual_tokens: int | None = None
    model: str = "demo"
    draft: str = "std"
    mode: Literal["std", "dense"] = "std"
    device: str = "cpu"


@dataclass(frozen=True)
class Asked:
    """One request's truth; `answer` is empty for the caption."""

    scenes: tuple[world.Scene, ...]
    answer: str = ""


@dataclass
class Tally:
    """Rights and counts per number of scenes."""

    right: Counter[tuple[int, str]] = field(default_factory=Counter)
    counted: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, asked: Asked, text: str) -> None:
        kind = "answer_accuracy" if asked.answer else "caption_clause_accuracy"
        right, counted = (
            (text.strip() == asked.answer, 1)
            if asked.answer
            else world.score_caption(asked.scenes, text)
        )
        self.right[len(asked.scenes), kind] += right
        self.counted[len(asked.scenes), kind] += counted

    def share(self, kind: str, scenes: int | None = None) -> float:
        keys = [key for key in self.counted if key[1] == kind and scenes in (None, key[0])]
        counted = sum(self.counted[key] for key in keys)
        return round(sum(self.right[key] for key in keys) / counted, 4) if counted else 0.0


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite demo_quality")
    if flags.clips < 1:
        raise UsageError(f"--clips is {flags.clips}: at least 1 is needed")
    if flags.visual_tokens is not None and flags.visual_tokens < 1:
        raise UsageError(f"--visual-tokens is {flags.visual_tokens}: at least 1 is needed")
    began = time.monotonic()
    draft = draft_of(Job(draft=flags.draft, mode=flags.mode))
    engine = Engine.load(model_path(flags.model), device=flags.device)
    truth: dict[str, Asked] = {}
    tally = Tally()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in engine.run(_requests(flags, engine, truth, Path(folder)), draft):
            if result.error is not None:
                raise result.error
            tally.add(truth.pop(result.request_id), result.text)
            results.append(result)
    return _figures(flags, tally, results) | {"seconds": round(time.monotonic() - began, 1)}


def _figures(flags: Flags, tally: Tally, results: list[Result]) -> dict[str, Any]:
    rounds = sum(r.rounds for r in results)
    kinds = ("caption_clause_accuracy", "answer_accuracy")
    by_scenes: dict[str, dict[str, float]] = defaultdict(dict)
    for scenes in sorted({scenes for scenes, _ in tally.counted}):
        by_scenes[str(scenes)] = {kind: tally.share(kind, scenes) for kind in kinds}
    return {kind: tally.share(kind) for kind in kinds} | {
        "by_scenes": by_scenes,
        "clips": flags.clips,
        "seed": flags.seed,
        "requests": len(results),
        "accepted_per_round": round(sum(r.accepted for r in results) / rounds, 4)
        if rounds
        else 0.0,
        "visual_tokens": round(sum(r.num_visual_tokens for r in results) / len(results), 1),
        "kv_keep": round(sum(r.kv_keep for r in results) / len(results), 4),
    }


def _requests(
    flags: Flags, engine: Engine, truth: dict[str, Asked], folder: Path
) -> Iterator[Request]:
    """Clip by clip, as the engine asks for them."""
    rng = random.Random(f"demo_quality {flags.seed}")
    for number in range(flags.clips):
        story, file = _clip(rng, flags.visual_tokens, engine.checkpoint.geometry)
        path = folder / f"{number}.mp4"
        path.write_bytes(file)
        frames, fps = _read(str(path), engine, flags.visual_tokens is not None)
        path.unlink()
        pool = world.questions(story)
        pairs = [(world.CAPTION_PROMPTS[0], ""), *rng.sample(pool, min(QUESTIONS, len(pool)))]
        for place, (prompt, answer) in enumerate(pairs):
            name = f"{number}/{place}"
            truth[name] = Asked(story, answer)
            yield Request(
                name,
                prompt=prompt,
                frames=frames,
                video_id=str(number),
                fps=fps,
                sampling=Sampling(MAX_TOKENS),
            )


def _clip(
    rng: random.Random, visual_tokens: int | None, geometry: Geometry
) -> tuple[tuple[world.Scene, ...], bytes]:
    """A short clip, or one whose scenes are repeated until its frames make about `visual_tokens`
    tokens."""
    seed = rng.getrandbits(48)
    if visual_tokens is None:
        return world.make_clip(seed, rng.randint(1, MAX_SCENES))
    scenes = rng.randint(*LONG_SCENES)
    height, width = smart_resize(
        *LONG_SIZE, geometry.factor, geometry.min_pixels, geometry.max_pixels
    )
    once = scenes * geometry.tokens(int(world.SCENE_SECONDS * LONG_RATE), height, width)
    return world.make_clip(
        seed, scenes, LONG_SIZE, LONG_RATE, repeats=max(1, round(visual_tokens / once))
    )


def _read(uri: str, engine: Engine, every_frame: bool) -> tuple[torch.Tensor, float]:
    """A clip's frames as a job would hand them to the engine; `every_frame` whatever their
    number."""
    info = probe(uri)
    options = FrameOptions(nframes=info.frames) if every_frame else FrameOptions()
    frames = decode(uri, info, plan_frames(info, options, engine.checkpoint.geometry))
    return torch.from_numpy(frames.pixels), frames.fps
