"""The synthetic videos: what is drawn, rendered and encoded."""

from __future__ import annotations

import io
import itertools
import random

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.demo_model import world


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_neighbouring_scenes_differ_and_true_captions_score_full(count: int, seed: int) -> None:
    scenes = world.draw_scenes(random.Random(seed), count)
    assert len(scenes) == count
    assert all((a.kind, a.colour) != (b.kind, b.colour) for a, b in itertools.pairwise(scenes))
    assert world.score_caption(scenes, world.caption(scenes)) == (count, count)
    assert len(world.questions(scenes)) == 4 * count + 1


def test_a_clause_is_right_only_with_its_position_and_all_attributes() -> None:
    a = world.Scene("small", "red", "ring", "moves up")
    b = world.Scene("large", "blue", "cross", "stays still")
    right = world.caption((a, b))
    assert world.score_caption((a, b), right) == (2, 2)
    assert world.score_caption((b, a), right) == (0, 2)
    assert world.score_caption((a, b), right.replace("Scene 2", "Scene 3")) == (1, 2)
    assert world.score_caption((a, b), right.replace("small", "large")) == (1, 2)
    assert world.score_caption((a, b), "") == (0, 2)
    assert world.score_caption((a,), right) == (1, 2)  # a scene too many


@pytest.mark.parametrize("kind", world.KINDS)
def test_kinds_look_different(kind: str) -> None:
    def shape(kind: str) -> torch.Tensor:
        frames = world.render_frames(
            [world.Scene("large", "white", kind, "stays still")],
            torch.tensor([1]),
            torch.tensor([0.5]),
            torch.tensor([[0.5, 0.5]]),
            background=torch.zeros(1, 3),
            height=84,
            width=84,
        )
        return frames > 127

    for other in set(world.KINDS) - {kind}:
        assert (shape(kind) != shape(other)).float().mean() > 0.02


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(world.CLIP_SIZES))
def test_a_shape_stays_in_the_frame_and_moves_as_its_caption_says(
    seed: int, size: tuple[int, int]
) -> None:
    rng = random.Random(seed)
    (scene,) = world.draw_scenes(rng, 1)
    height, width = size
    frames = world.render_frames(
        [scene] * 3,
        torch.ones(3, dtype=torch.long),
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([world.draw_centre(rng, scene)] * 3),
        background=torch.zeros(3, 3),
        height=height,
        width=width,
    )
    slate = round(height * world.SLATE_HEIGHT)
    visible = frames[:, :, slate:].amax(1) > 8
    centres = []
    areas = []
    for image in visible:
        y, x = np.nonzero(image.numpy())
        areas.append(len(x))
        centres.append((x.mean(), y.mean()))
    assert min(areas) > 0.9 * max(areas)  # a large triangle's tip may leave the frame
    moved = np.sign(np.round((np.array(centres[2]) - np.array(centres[0])) / 4))
    assert moved.tolist() == list(world.MOTIONS[scene.motion])


def test_a_clip_is_h264_and_the_same_for_the_same_seed() -> None:
    scenes, data = world.make_clip(7, 3)
    assert (scenes, data) == world.make_clip(7, 3)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert len(list(container.decode(stream))) == 3 * world.SCENE_SECONDS * 8


def test_a_long_clip_repeats_the_scenes_of_the_short_one() -> None:
    scenes, short = world.make_clip(11, 2, (64, 64), 2)
    same, long = world.make_clip(11, 2, (64, 64), 2, repeats=5)
    assert same == scenes

    def decode(data: bytes) -> np.ndarray:
        with av.open(io.BytesIO(data)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames).astype(int)

    short_frames = decode(short)
    long_frames = decode(long)
    assert len(long_frames) == 5 * len(short_frames) == 5 * 2 * world.SCENE_SECONDS * 2
    for scene in range(2):
        expected = short_frames[4 * scene :][:4]
        for repeat in range(5):
            shown = long_frames[20 * scene + 4 * repeat :][:4]
            assert np.abs(shown - expected).mean() < 4


@pytest.mark.parametrize("size", world.CLIP_SIZES)
def test_the_slate_shows_every_scenes_number_after_encoding(size: tuple[int, int]) -> None:
    _, data = world.make_clip(3, world.MAX_SCENES, size, 2)
    with av.open(io.BytesIO(data)) as container:
        frames = [
            frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)
        ]
    colours = np.array([world.COLOURS[name] for name in world.SLATE])
    stripe = size[0] * world.SLATE_HEIGHT / 2
    numbers = []
    for frame in frames:
        stripes = np.stack([frame[round(stripe * (k + 0.5))].mean(0) for k in (0, 1)])
        high, low = np.abs(stripes[:, None] - colours).sum(-1).argmin(1)
        numbers.append(4 * high + low + 1)
    per_scene = len(frames) // world.MAX_SCENES
    assert numbers == [k for k in range(1, world.MAX_SCENES + 1) for _ in range(per_scene)]
