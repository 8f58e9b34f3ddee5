"""From a file to a model's input, compared with Hugging Face's processors on the full frames: equal
token ids, and pixels within the tolerance of the resize."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from pipeline.records import FrameOptions, VideoInfo
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import close_workers
from std_core.model.checkpoint import Checkpoint
from std_core.types import Request

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision")
RATE = 24
COUNT = 96
PROMPT = "Describe this video."
OPTIONS = [
    FrameOptions(),
    FrameOptions(nframes=6),
    FrameOptions(nframes=5),
    FrameOptions(fps=8, max_frames=10),
    FrameOptions(video_start=1.3, video_end=3.1),
    FrameOptions(nframes=1),
]


@pytest.fixture(scope="module", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    close_workers()


def footage(height: int, width: int) -> np.ndarray:
    """Smooth moving shapes; (COUNT, height, width, 3) uint8."""
    y, x = np.mgrid[:height, :width] / 40
    waves = [np.sin(x + n / 9) * np.cos(y - n / 13 + k) for n in range(COUNT) for k in range(3)]
    return (
        (127 + 120 * np.stack(waves))
        .astype(np.uint8)
        .reshape(COUNT, 3, height, width)
        .transpose(0, 2, 3, 1)
    )


@pytest.fixture(scope="module", params=[(144, 176), (90, 250)], ids=str)
def clip(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, np.ndarray]:
    """A file and its decoded frames."""
    height, width = request.param
    path = tmp_path_factory.mktemp("clip") / "v.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"g": "24"})
        stream.height = height
        stream.width = width
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(footage(height, width)):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")
            frame.pts = number
            frame.time_base = Fraction(1, RATE)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with av.open(str(path)) as container:
        return str(path), np.stack(
            [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        )


def reference(
    checkpoint: Checkpoint, images: np.ndarray, numbers: list[int], span: int, **options: Any
) -> Any:
    """The output of the family's processor for the full frames with these numbers, sampled from
    `span` frames."""
    if checkpoint.config.model_type != "llava_onevision":
        options["cap_pixels_per_frame"] = True
    return checkpoint.processor(
        text=[checkpoint.render(PROMPT)],
        videos=[torch.from_numpy(images[numbers]).permute(0, 3, 1, 2)],
        video_metadata=[
            VideoMetadata(
                total_num_frames=span, fps=RATE, duration=span / RATE, frames_indices=numbers
            )
        ],
        do_sample_frames=False,
        return_mm_token_type_ids=True,
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_equal_the_familys_processor(
    family: str, clip: tuple[str, np.ndarray], families: Callable[[str], Path]
) -> None:
    path, images = clip
    checkpoint = Checkpoint.load(str(families(family)))
    for options in OPTIONS:
        info = probe(path)
        plan = plan_frames(info, options, checkpoint.geometry)
        frames = decode(path, info, plan)
        inputs = checkpoint.preprocess(
            Request(
                "r",
                prompt=PROMPT,
                frames=torch.from_numpy(frames.pixels),
                fps=frames.fps,
                times=frames.pts,
            )
        )
        numbers = [round(time * RATE) for time in plan.times]
        span = round(len(numbers) * RATE / plan.fps)  # frames of the chosen part
        out = reference(checkpoint, images, numbers, span)
        assert inputs.ids.tolist() == torch.as_tensor(out["input_ids"]).tolist()
        assert plan.tokens == len(inputs.visual_positions)
        text = checkpoint.count_prompt_tokens(PROMPT, len(plan.times), plan.fps, plan.times)
        assert text + plan.tokens == inputs.ids.shape[1]
        if "second_per_grid_ts" in out:
            assert inputs.second_per_grid is not None
            assert inputs.second_per_grid.tolist() == pytest.approx(list(out["second_per_grid_ts"]))
        patches = (
            torch.as_tensor(np.asarray(out["pixel_values_videos"][0]))
            if family == "llava_onevision"
            else out["pixel_values_videos"]
        )
        assert inputs.video_patches is not None
        difference = (inputs.video_patches - patches).abs() * 255 * 0.26  # grey levels, at least
        assert difference.mean() < 0.5
        assert difference.max() <= 16


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_pixel_cap_of_qwen_vl_utils_applies_unless_the_checkpoint_turns_it_off(
    name: str, families: Callable[[str], Path]
) -> None:
    """The cap is nine tenths of the pixels of so many tokens, shared evenly by the frames; the test
    sets a small number, so that it takes effect."""
    checkpoint = Checkpoint.load(str(families(name)))
    video = checkpoint.processor.video_processor
    factor = checkpoint.geometry.factor
    assert checkpoint.geometry.total_pixels is None  # the configuration turns the cap off
    video.cap_pixels_per_frame = None
    assert checkpoint.family.geometry(checkpoint.processor).total_pixels == int(
        128_000 * factor**2 * 0.9
    )
    video.size = {"shortest_edge": 4 * factor**2, "longest_edge": 768 * factor**2}
    video.max_video_tokens = 300
    geometry = checkpoint.family.geometry(checkpoint.processor)
    sizes = set()
    for count in (2, 6, 12, 40):
        info = VideoInfo(
            "v",
            size_bytes=1,
            version="1",
            container="mp4",
            codec="h264",
            duration=count / 2,
            start=0.0,
            frames=count,
            exact=True,
            fps=2.0,
            height=240,
            width=320,
            rotation=0,
        )
        plan = plan_frames(info, FrameOptions(), geometry)
        out = video(
            videos=[torch.zeros(count, 3, 240, 320, dtype=torch.uint8)], cap_pixels_per_frame=True
        )
        assert (
            plan.tokens == int(torch.as_tensor(out["video_grid_thw"]).prod()) // video.merge_size**2
        )
        sizes.add((plan.height, plan.width))
    assert len(sizes) > 2
    video.cap_pixels_per_frame = False
    assert checkpoint.family.geometry(checkpoint.processor).total_pixels is None
