"""The demo model's synthetic videos: shapes that appear one after another, with the true caption
and the true answers of every clip.

A clip is a sequence of scenes of two seconds. A scene has one shape with four attributes: kind,
colour, size and motion. In a long clip each scene is repeated, at the same speed, so that a moving
shape always visibly moves. A slate along the upper edge shows the scene's number, so that the model
can read "scene 7" instead of counting.

Training (`python -m jobs.demo_model.training.train`) and the encoded clips (the demo, the tests,
the suite `demo_quality`) are rendered by the same code, so that the model learns what the frames
stage later reads."""

from __future__ import annotations

import io
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

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
SIZES = {"small": 0.15, "large": 0.27}  # radius over the frame's short side
MOTIONS = {  # x and y direction
    "moves left": (-1, 0),
    "moves right": (1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "stays still": (0, 0),
}
SCENE_SECONDS = 2.0
TRAVEL = 0.4  # path of a moving shape in one scene, over the short side
MAX_SCENES = 12
CLIP_SIZES = ((240, 320), (240, 240), (320, 240), (180, 320), (192, 256))  # height, width
# The slate's two stripes are the base-4 digits of the scene's number, counted from 0; the upper one
# is the first digit.
SLATE = ("red", "green", "blue", "white")
SLATE_HEIGHT = 0.1  # over the frame's height

CAPTION_PROMPTS = (
    "Describe this video.",
    "Describe the video.",
    "What happens in this video?",
    "Caption this video.",
    "Describe the video scene by scene.",
)
CLAUSE_PATTERN = re.compile(r"Scene (\d+): a (\w+) (\w+) (\w+) (moves \w+|stays still)\.")


@dataclass(frozen=True)
class Scene:
    """One shape, described by the words above."""

    size: str
    colour: str
    kind: str
    motion: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.kind} {self.motion}"


def draw_scenes(rng: random.Random, count: int) -> tuple[Scene, ...]:
    """Random scenes; neighbours differ in kind or colour, so that it is visible where one ends."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = Scene(
            rng.choice(list(SIZES)),
            rng.choice(list(COLOURS)),
            rng.choice(KINDS),
            rng.choice(list(MOTIONS)),
        )
        previous = scenes[-1] if scenes else None
        if previous is None or (scene.kind, scene.colour) != (previous.kind, previous.colour):
            scenes.append(scene)
    return tuple(scenes)


def caption(scenes: tuple[Scene, ...]) -> str:
    """The true caption: one clause per scene."""
    return " ".join(f"Scene {k}: {scene}." for k, scene in enumerate(scenes, 1))


def questions(scenes: tuple[Scene, ...]) -> list[tuple[str, str]]:
    """All questions about a clip with their answers: four per scene, and last the number of
    scenes."""
    pairs = []
    for k, scene in enumerate(scenes, 1):
        pairs += [
            (f"Which shape is in scene {k}?", f"It is a {scene.kind}."),
            (f"What colour is the shape in scene {k}?", f"It is {scene.colour}."),
            (f"How big is the shape in scene {k}?", f"It is {scene.size}."),
            (f"How does the shape in scene {k} move?", f"It {scene.motion}."),
        ]
    count = "is 1 scene" if len(scenes) == 1 else f"are {len(scenes)} scenes"
    return [*pairs, ("How many scenes are there?", f"There {count}.")]


class CaptionScore(NamedTuple):
    """Clauses of a caption that are right, and clauses that count."""

    right: int
    counted: int


def score_caption(scenes: tuple[Scene, ...], text: str) -> CaptionScore:
    """Compare a text with the true caption.

    A clause is right if its number, its position and all four attributes are. Clauses beyond the
    last scene count as wrong, as missing ones do.
    """
    clauses = [
        (int(number), f"a {size} {colour} {kind} {motion}")
        for number, size, colour, kind, motion in CLAUSE_PATTERN.findall(text)
    ]
    expected = [(number, str(scene)) for number, scene in enumerate(scenes, 1)]
    right = sum(a == b for a, b in zip(clauses, expected, strict=False))
    return CaptionScore(right, max(len(expected), len(clauses)))


# ---------------------------------------------------------------------------------------- rendering


def render_frames(
    scenes: list[Scene],
    number: torch.Tensor,
    progress: torch.Tensor,
    centre: torch.Tensor,
    *,
    background: torch.Tensor,
    height: int,
    width: int,
) -> torch.Tensor:
    """Render N frames, each of a scene at one moment.

    Args:
        scenes: N scenes, one per frame.
        number: (N,) of the scene in its clip, from 1 to `MAX_SCENES`.
        progress: (N,) time within the scene, 0 to 1.
        centre: (N, 2) the shape's x and y in the middle of the scene, over width and height.
        background: (N, 3) RGB, 0 to 255.
        height, width: of the frames, in pixels.

    Returns:
        (N, 3, height, width) float32, 0 to 255.
    """
    short_side = min(height, width)
    radius = torch.tensor([SIZES[s.size] for s in scenes]) * short_side
    direction = torch.tensor([MOTIONS[s.motion] for s in scenes], dtype=torch.float32)
    moved = direction * ((progress - 0.5) * TRAVEL * short_side)[:, None]
    position = centre * torch.tensor([width, height]) + moved
    # (N, width) and (N, height): distance of a pixel's middle from the shape's centre, in radii
    x = ((torch.arange(width) + 0.5)[None, :] - position[:, :1]) / radius[:, None]
    y = ((torch.arange(height) + 0.5)[None, :] - position[:, 1:]) / radius[:, None]
    coverage = torch.empty(len(scenes), height, width)
    kinds = np.array([s.kind for s in scenes])
    for kind in KINDS:
        rows = torch.from_numpy(np.flatnonzero(kinds == kind))
        if len(rows):
            distance = _signed_distance(kind, x[rows, None, :], y[rows, :, None])
            # an edge one pixel wide
            coverage[rows] = (0.5 - distance * radius[rows, None, None]).clamp(0, 1)
    colour = torch.tensor([COLOURS[s.colour] for s in scenes], dtype=torch.float32)
    contrast = (colour - background)[:, :, None, None]
    frames = torch.addcmul(background[:, :, None, None], coverage[:, None], contrast)
    slate = _render_slate(number, height)
    frames[:, :, : slate.shape[2]] = slate
    return frames


def _render_slate(number: torch.Tensor, height: int) -> torch.Tensor:
    """(N, 3, rows of the slate, 1), 0 to 255."""
    rows = max(2, round(height * SLATE_HEIGHT))
    from_zero = number - 1
    digits = torch.stack((from_zero >> 2, from_zero & 3), 1)  # (N, 2)
    stripe_of_row = torch.arange(rows) * 2 // rows
    palette = torch.tensor([COLOURS[name] for name in SLATE], dtype=torch.float32)
    return palette[digits[:, stripe_of_row]].transpose(1, 2)[..., None]


def _signed_distance(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance to the outline of a shape of radius 1, negative inside; y points down."""
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
    horizontal_bar = torch.maximum(ax - 1, ay - 0.33)
    vertical_bar = torch.maximum(ax - 0.33, ay - 1)
    return torch.minimum(horizontal_bar, vertical_bar)  # cross


def draw_centre(rng: random.Random, scene: Scene) -> tuple[float, float]:
    """A random x and y, over width and height, from which the whole path stays inside a frame of
    any shape and below its slate. A large shape that moves up or down touches both edges."""
    free = 0.49 - SIZES[scene.size]
    dx, dy = MOTIONS[scene.motion]
    slate = SLATE_HEIGHT / 2
    x_range = max(0.0, free - abs(dx) * TRAVEL / 2)
    y_range = max(0.0, free - slate - abs(dy) * TRAVEL / 2)
    return (0.5 + rng.uniform(-1, 1) * x_range, 0.5 + slate + rng.uniform(-1, 1) * y_range)


def draw_background(rng: random.Random) -> tuple[float, float, float]:
    """A random dark grey, slightly tinted: RGB, 0 to 255."""
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
    """All frames of a clip at `rate` frames/s: (T, height, width, 3) uint8.

    Args:
        repeats: how often each scene is shown before the next one begins.
    """
    per_scene = int(SCENE_SECONDS * rate)
    background = torch.tensor(draw_background(rng)).expand(per_scene, 3)
    progress = (torch.arange(per_scene) + 0.5) / per_scene
    centres = [draw_centre(rng, scene) for scene in scenes]
    parts = []
    for number, (scene, centre) in enumerate(zip(scenes, centres, strict=True), 1):
        frames = render_frames(
            [scene] * per_scene,
            torch.full((per_scene,), number),
            progress,
            torch.tensor([centre] * per_scene),
            background=background,
            height=height,
            width=width,
        )
        pixels = frames.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        parts.append(np.tile(pixels.contiguous().numpy(), (repeats, 1, 1, 1)))
    return np.concatenate(parts)


def encode(frames: np.ndarray, rate: int, codec: str = "libx264", container: str = "mp4") -> bytes:
    """Encode `frames`, (T, height, width, 3) uint8, as one video file in memory."""
    import av  # not at the top: training needs no video library

    options = {"crf": "20"} if codec == "libx264" else {}
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, rate)
        stream.codec_context.thread_count = 1  # with more, bytes differ from run to run
        for image in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode())
    return buffer.getvalue()


class EncodedClip(NamedTuple):
    """A clip's scenes and its MP4 file."""

    scenes: tuple[Scene, ...]
    data: bytes


def make_clip(
    seed: int, scenes: int, size: tuple[int, int] | None = None, rate: int = 8, repeats: int = 1
) -> EncodedClip:
    """The clip of a seed, encoded as H.264.

    Args:
        scenes: their number.
        size: height and width in pixels; one of `CLIP_SIZES` if None.
        rate: frames/s.
        repeats: how often each scene is shown; a scene then lasts `repeats` × `SCENE_SECONDS`.
    """
    rng = random.Random(seed)
    drawn = draw_scenes(rng, scenes)
    height, width = size or rng.choice(CLIP_SIZES)
    frames = clip_frames(rng, drawn, height, width, rate=rate, repeats=repeats)
    return EncodedClip(drawn, encode(frames, rate))
