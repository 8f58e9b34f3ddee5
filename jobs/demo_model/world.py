"""The demo model's world: shapes that appear one after another, with the true caption and answers
of every clip.

A clip is a list of scenes of two seconds. A scene is one shape with four attributes: kind, colour,
size, motion; in a long clip it goes its way several times before the next scene begins, so that a
moving shape always visibly moves. Along the upper edge a slate tells the scene's number, so that
"scene 7" is found by looking and not by counting. The same painter draws the training batches
(`jobs/demo_model/training/train.py`) and the clips that are encoded as H.264 (the demo, the tests,
the quality suite), so what the model learns is what the frames stage later reads."""

from __future__ import annotations

import io
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

KINDS = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {
    "red": (225, 45, 40),
    "green": (40, 185, 65),
    "blue": (45, 85, 235),
    "yellow": (240, 220, 50),
    "purple": (170, 60, 205),
    "white": (242, 242, 242),
}
SIZES = {"small": 0.15, "large": 0.27}  # radius, as a share of the frame's short side
MOTIONS = {
    "moves left": (-1, 0),
    "moves right": (1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "stays still": (0, 0),
}
SCENE_SECONDS = 2.0
TRAVEL = 0.4  # of the short side, over one scene
MAX_SCENES = 12
SLATE = (
    "red",
    "green",
    "blue",
    "white",
)  # its two stripes are the digits of the scene's number, from 0, to base 4
SLATE_HEIGHT = 0.1  # of the frame

CAPTION_PROMPTS = (
    "Describe this video.",
    "Describe the video.",
    "What happens in this video?",
    "Caption this video.",
    "Describe the video scene by scene.",
)
CLAUSE = re.compile(r"Scene (\d+): a (\w+) (\w+) (\w+) (moves \w+|stays still)\.")


@dataclass(frozen=True)
class Scene:
    """One shape; every field is a word of the vocabulary above."""

    size: str
    colour: str
    kind: str
    motion: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.kind} {self.motion}"


def draw_scenes(rng: random.Random, count: int) -> tuple[Scene, ...]:
    """`count` scenes; neighbours differ in kind or colour, else nobody could say where one ends."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = Scene(
            rng.choice(list(SIZES)),
            rng.choice(list(COLOURS)),
            rng.choice(KINDS),
            rng.choice(list(MOTIONS)),
        )
        if not scenes or (scene.kind, scene.colour) != (scenes[-1].kind, scenes[-1].colour):
            scenes.append(scene)
    return tuple(scenes)


def caption(scenes: tuple[Scene, ...]) -> str:
    """The true caption: one clause per scene, in order."""
    return " ".join(f"Scene {k}: {scene}." for k, scene in enumerate(scenes, 1))


def questions(scenes: tuple[Scene, ...]) -> list[tuple[str, str]]:
    """Every question the world knows about a clip, with its answer: four per scene, and the
    count."""
    asked = []
    for k, scene in enumerate(scenes, 1):
        asked += [
            (f"Which shape is in scene {k}?", f"It is a {scene.kind}."),
            (f"What colour is the shape in scene {k}?", f"It is {scene.colour}."),
            (f"How big is the shape in scene {k}?", f"It is {scene.size}."),
            (f"How does the shape in scene {k} move?", f"It {scene.motion}."),
        ]
    plural = "is 1 scene" if len(scenes) == 1 else f"are {len(scenes)} scenes"
    return [*asked, ("How many scenes are there?", f"There {plural}.")]


def score_caption(scenes: tuple[Scene, ...], text: str) -> tuple[int, int]:
    """(right, counted): a clause is right with its number, its place and all four attributes; what
    is written beyond the true number of scenes counts as wrong."""
    found = [
        (int(n), f"a {size} {colour} {kind} {motion}")
        for n, size, colour, kind, motion in CLAUSE.findall(text)
    ]
    right = sum(
        got == (k, str(scene)) for k, (got, scene) in enumerate(zip(found, scenes, strict=False), 1)
    )
    return right, max(len(scenes), len(found))


# ----------------------------------------------------------------------------------------- painting


def paint(
    scene: list[Scene],
    number: torch.Tensor,
    progress: torch.Tensor,
    centre: torch.Tensor,
    background: torch.Tensor,
    height: int,
    width: int,
) -> torch.Tensor:
    """Frames of N scenes at given moments.

    Args: scene: N scenes, one for each frame. number: (N,) which scene of its clip that is, from 1
        to `MAX_SCENES`. progress: (N,) how far into its scene a frame lies, 0 to 1. centre: (N, 2)
        the shape's x and y in the middle of its scene, as shares of width and height. background:
        (N, 3) RGB, 0 to 255. height, width: of the frames, in pixels.

    Returns:
        (N, 3, height, width) float32, 0 to 255.
    """
    short = min(height, width)
    radius = torch.tensor([SIZES[s.size] for s in scene]) * short
    heading = torch.tensor([MOTIONS[s.motion] for s in scene], dtype=torch.float32)
    at = (
        centre * torch.tensor([width, height])
        + heading * ((progress - 0.5) * TRAVEL * short)[:, None]
    )
    x = ((torch.arange(width) + 0.5)[None, :] - at[:, :1]) / radius[:, None]  # (N, width), in radii
    y = ((torch.arange(height) + 0.5)[None, :] - at[:, 1:]) / radius[:, None]
    inside = torch.empty(len(scene), height, width)
    kinds = np.array([s.kind for s in scene])
    for kind in KINDS:
        rows = torch.from_numpy(np.flatnonzero(kinds == kind))
        if len(rows):
            outline = _distance(kind, x[rows, None, :], y[rows, :, None]) * radius[rows, None, None]
            inside[rows] = (0.5 - outline).clamp(0, 1)
    colour = torch.tensor([COLOURS[s.colour] for s in scene], dtype=torch.float32)
    frames = torch.addcmul(
        background[:, :, None, None], inside[:, None], (colour - background)[:, :, None, None]
    )
    slate = _slate(number, height)
    frames[:, :, : slate.shape[2]] = slate
    return frames


def _slate(number: torch.Tensor, height: int) -> torch.Tensor:
    """(N, 3, its height, 1): the upper stripe is the number's first digit."""
    rows = max(2, round(height * SLATE_HEIGHT))
    digit = torch.stack((number - 1 >> 2, number - 1 & 3), 1)[
        :, torch.arange(rows) * 2 // rows
    ]  # (N, rows)
    return torch.tensor([COLOURS[name] for name in SLATE], dtype=torch.float32)[digit].transpose(
        1, 2
    )[..., None]


def _distance(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to the outline of a shape of radius 1 (negative inside); y points down."""
    ax = x.abs()
    ay = y.abs()
    if kind == "circle":
        return (x * x + y * y).sqrt() - 1
    if kind == "ring":
        return ((x * x + y * y).sqrt() - 0.72).abs() - 0.28
    if kind == "square":
        return torch.maximum(ax, ay) - 0.85
    if kind == "triangle":
        return torch.maximum(y, 0.866 * ax - 0.5 * y) - 0.6
    return torch.minimum(
        torch.maximum(ax - 1, ay - 0.33), torch.maximum(ax - 0.33, ay - 1)
    )  # cross


def place(rng: random.Random, scene: Scene) -> tuple[float, float]:
    """A centre from which the whole path stays inside a frame of any shape and below its slate
    (shares of width and height); but a large shape that moves up or down touches both edges."""
    free = 0.49 - SIZES[scene.size]
    dx, dy = MOTIONS[scene.motion]
    slate = SLATE_HEIGHT / 2
    return (
        0.5 + rng.uniform(-1, 1) * max(0.0, free - abs(dx) * TRAVEL / 2),
        0.5 + slate + rng.uniform(-1, 1) * max(0.0, free - slate - abs(dy) * TRAVEL / 2),
    )


def grey(rng: random.Random) -> tuple[float, float, float]:
    """A dark background, slightly tinted."""
    level = rng.uniform(15, 80)
    return (
        level + rng.uniform(-12, 12),
        level + rng.uniform(-12, 12),
        level + rng.uniform(-12, 12),
    )


def clip_frames(
    rng: random.Random,
    scenes: tuple[Scene, ...],
    height: int,
    width: int,
    rate: int,
    repeats: int = 1,
) -> np.ndarray:
    """All frames of a clip at `rate` frames a second, each scene `repeats` times over: (T, height,
    width, 3) uint8."""
    per_scene = int(SCENE_SECONDS * rate)
    shade = torch.tensor(grey(rng)).expand(per_scene, 3)
    moments = (torch.arange(per_scene) + 0.5) / per_scene
    parts = []
    for number, (scene, spot) in enumerate(
        zip(scenes, [place(rng, scene) for scene in scenes], strict=True), 1
    ):
        spots = torch.tensor([spot] * per_scene)
        numbers = torch.full((per_scene,), number)
        frames = paint(
            [scene] * per_scene,
            numbers,
            moments,
            spots,
            background=shade,
            height=height,
            width=width,
        )
        frames = frames.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        parts.append(np.tile(frames.contiguous().numpy(), (repeats, 1, 1, 1)))
    return np.concatenate(parts)


def encode(frames: np.ndarray, rate: int, codec: str = "libx264", container: str = "mp4") -> bytes:
    """One video file in memory, `frames` as (T, height, width, 3) uint8."""
    import av  # here, so that training needs no video library

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream: Any = out.add_stream(
            codec, rate=rate, options={"crf": "20"} if codec == "libx264" else {}
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, rate)
        stream.codec_context.thread_count = 1  # with more the bytes differ from run to run
        for image in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode())
    return buffer.getvalue()


CLIP_SIZES = ((240, 320), (240, 240), (320, 240), (180, 320), (192, 256))  # height, width


def make_clip(
    seed: int, scenes: int, size: tuple[int, int] | None = None, rate: int = 8, repeats: int = 1
) -> tuple[tuple[Scene, ...], bytes]:
    """The clip that belongs to a seed: its scenes and its MP4 file (H.264). With `repeats` a scene
    lasts that many times `SCENE_SECONDS`: its shape goes its way again and again, as fast as
    ever."""
    rng = random.Random(seed)
    story = draw_scenes(rng, scenes)
    height, width = size or rng.choice(CLIP_SIZES)
    return story, encode(clip_frames(rng, story, height, width, rate=rate, repeats=repeats), rate)
