"""Each family against Hugging Face's `generate`; token counts; unsupported architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    InternVLConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from jobs.suites.shared import reference, tiny_models
from pipeline.records import FrameOptions, VideoInfo
from pipeline.video.frame_plan import plan_frames
from std_core.engine.engine import Engine
from std_core.model.checkpoint import Checkpoint
from std_core.model.families import FAMILIES, generation_class, unsupported_reason
from std_core.types import Counters, Draft, Request, Sampling

TEXT = ("llama", "qwen3")
VISUAL = tuple(name for name in tiny_models.FAMILIES if name not in TEXT)
DRAFTS = {
    "dense": None,
    "std": Draft("std", keep=0.2, gamma=5),
    "random": Draft("random", k=2, gamma=3),
    "full": Draft("full", gamma=4),
}


def picture(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def requests_of(family: str) -> list[Request]:
    """Requests with videos, images, both, several and none, and outputs of different lengths."""
    if family in TEXT:
        words = ["square", "circle", "red", "blue", "moves", "left", "up", "the", "scene"]
        texts = (
            " ".join(words[(i * i + seed) % len(words)] for i in range(20 + 45 * seed))
            for seed in range(6)
        )
        return [
            Request(f"t{n}", text + "?", sampling=Sampling(6 + 5 * n))
            for n, text in enumerate(texts)
        ]
    clip = picture(1, 6, 56, 84)
    other = picture(2, 6, 84, 56)
    visual: dict[str, dict[str, Any]] = {
        "video": {"frames": clip},
        # an odd number of frames, so far apart that time-based positions exceed those of the text
        # behind them
        "slow": {"frames": picture(3, 5, 56, 56), "fps": 0.1},
        "images": {"images": (clip[0], other[1])},
        "text": {},
        "videos": {"frames": clip, "videos": (other,), "fps": 1.3},
        "image": {"images": (picture(4, 84, 112),)},
        "both": {"frames": other, "images": (clip[2],), "fps": 4.0},
    }
    return [
        Request(name, f"What is the {name}?", sampling=Sampling(6 + 4 * n), **kinds)
        for n, (name, kinds) in enumerate(visual.items())
    ]


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(name: str, families: Callable[[str], Path]) -> Engine:
    return Engine.load(str(families(name)), max_num_seqs=3)


@pytest.fixture(scope="module")
def hf(name: str, families: Callable[[str], Path]) -> Any:
    kind = AutoModelForCausalLM if name in TEXT else AutoModelForImageTextToText
    return kind.from_pretrained(families(name), dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(name: str, engine: Engine, hf: Any) -> dict[str, list[int]]:
    return {r.request_id: generate(hf, engine, r) for r in requests_of(name)}


def processor_output(name: str, checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
    """Call the family's processor as its documentation states."""
    videos = [v.permute(0, 3, 1, 2) for v in (request.frames, *request.videos) if v is not None]
    images = [i.permute(2, 0, 1) for i in request.images]
    content = [*[{"type": "video"}] * len(videos), *[{"type": "image"}] * len(images)]
    content = [*content, {"type": "text", "text": request.prompt}]
    talk = [{"role": "user", "content": request.prompt if name in TEXT else content}]
    text = checkpoint.processor.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=False
    )
    if name in TEXT:
        return dict(checkpoint.processor(text, return_tensors="pt"))
    sampled = [
        {"total_num_frames": len(v), "fps": request.fps, "frames_indices": [*range(len(v))]}
        for v in videos
    ]
    given: dict[str, Any] = {"videos": videos, "video_metadata": sampled} if videos else {}
    given |= {"images": [images]} if images else {}
    size: dict[str, Any] = {} if name == "llava_onevision" else {"do_resize": False}
    out = checkpoint.processor(
        text=[text], **given, **size, do_sample_frames=False, return_tensors="pt"
    )
    return {k: v for k, v in out.items() if k != "video_metadata"}


def generate(hf: Any, engine: Engine, request: Request) -> list[int]:
    """New tokens of Hugging Face's `generate`, with the positions of the engine's rule."""
    inputs = processor_output(hf.config.model_type, engine.checkpoint, request)
    inputs |= reference.hf_positions(engine.model, [engine.checkpoint.preprocess(request)])
    out = hf.generate(**inputs, max_new_tokens=request.sampling.max_tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_equal_generates(
    name: str, engine: Engine, expected: dict[str, list[int]], draft: str
) -> None:
    results = list(engine.run(requests_of(name), DRAFTS[draft]))
    assert {r.request_id: r.token_ids for r in results} == expected
    assert len(results) == len(expected) > engine.max_num_seqs  # slots were refilled
    if draft == "full":
        assert [r.accepted for r in results] == [r.proposed for r in results]
        assert sum(r.proposed for r in results) > 50
    if draft == "random":  # rejections are exercised
        assert sum(r.accepted for r in results) < sum(r.proposed for r in results)


def test_preprocessing_equals_the_processors(name: str, engine: Engine) -> None:
    for request in requests_of(name):
        inputs = engine.checkpoint.preprocess(request)
        own = processor_output(name, engine.checkpoint, request)
        assert torch.equal(inputs.ids, own["input_ids"])
        assert len(inputs.visual_positions) == 0 or torch.equal(
            inputs.token_types, own.get("mm_token_type_ids", inputs.token_types)
        )


def test_prefill_in_small_chunks_gives_the_same_tokens(
    name: str, engine: Engine, expected: dict[str, list[int]]
) -> None:
    chunked = replace(engine, prefill_chunk=7)
    results = {
        r.request_id: r.token_ids for r in chunked.run(requests_of(name), Draft("std", keep=0.3))
    }
    assert results == expected


@pytest.mark.parametrize("name", VISUAL, indirect=True, scope="module")
def test_questions_on_one_video_share_its_prefix(name: str, engine: Engine, hf: Any) -> None:
    clip = picture(1, 6, 56, 84)
    requests = [
        Request(
            f"q{n}",
            prompt=f"What is in scene {n}?",
            frames=clip,
            video_id="clip",
            fps=0.9,
            sampling=Sampling(8 + n),
        )
        for n in range(5)
    ]
    sharing = replace(engine, counters=Counters())
    results = {r.request_id: r.token_ids for r in sharing.run(requests, Draft("random", keep=0.3))}
    assert results == {r.request_id: generate(hf, engine, r) for r in requests}
    assert (sharing.counters.vision_passes, sharing.counters.prefix_prefills) == (1, 1)


# ------------------------------------------------------------------------------------- token counts


@pytest.mark.parametrize("family_name", VISUAL)
@pytest.mark.parametrize(
    ("frames", "sides"), [(8, (240, 320)), (5, (320, 240)), (2, (97, 351)), (24, (720, 1280))]
)
def test_the_plan_counts_the_prompts_tokens(
    families: Callable[[str], Path], family_name: str, frames: int, sides: tuple[int, int]
) -> None:
    checkpoint = Checkpoint.load(str(families(family_name)))
    info = VideoInfo(
        "x.mp4", 1, "1", "mp4", "h264", frames / 3, 0.0, frames, True, 3.0, *sides, rotation=0
    )
    plan = plan_frames(info, FrameOptions(nframes=frames), checkpoint.geometry)
    count = len(plan.times)
    request = Request("a", "What?", picture(0, count, plan.height, plan.width), fps=plan.fps)
    inputs = checkpoint.preprocess(request)
    assert len(inputs.visual_positions) == plan.tokens
    assert inputs.ids.shape[1] == plan.tokens + checkpoint.count_prompt_tokens(
        "What?", count, plan.fps
    )


def test_a_prompt_with_timestamps_grows_with_frames_and_time(
    families: Callable[[str], Path],
) -> None:
    checkpoint = Checkpoint.load(str(families("qwen3_vl")))
    counts = [
        checkpoint.count_prompt_tokens("What?", frames, fps)
        for frames, fps in ((2, 2.0), (8, 2.0), (8, 0.01))
    ]
    assert counts[0] < counts[1] < counts[2]


def test_llava_videos_of_different_lengths(
    families: Callable[[str], Path],
) -> None:
    """The oracle encodes the videos one by one: transformers takes only equal lengths at once."""
    folder = families("llava_onevision")
    engine = Engine.load(str(folder))
    hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    request = Request(
        "a",
        prompt="What?",
        frames=picture(1, 6, 56, 56),
        videos=(picture(2, 3, 56, 56),),
        sampling=Sampling(16),
    )
    inputs = engine.checkpoint.preprocess(request)
    assert inputs.video_patches is not None
    with torch.no_grad():
        features = [
            hf.get_video_features(v[None]).pooler_output for v in inputs.video_patches.split([6, 3])
        ]
    seen = {"video": BaseModelOutputWithPooling(pooler_output=torch.cat(features, dim=1))}
    out = hf.generate(
        input_ids=inputs.ids,
        attention_mask=torch.ones_like(inputs.ids),
        mm_encoder_outputs=seen,
        max_new_tokens=16,
        do_sample=False,
    )
    (result,) = engine.run([request], Draft("std"))
    assert result.token_ids == out[0, inputs.ids.shape[1] :].tolist()


# -------------------------------------------------------------------------------------- unsupported

UNSUPPORTED: dict[str, tuple[PreTrainedConfig, str]] = {
    "sliding by layers": (Gemma2Config(), "layers of sliding_attention"),
    "sliding throughout": (MistralConfig(sliding_window=4096), "a sliding window of 4096 tokens"),
    "sliding above some layer": (
        Qwen2Config(use_sliding_window=True, sliding_window=512, max_window_layers=2),
        "layers of sliding_attention",
    ),
    "linear by layers": (Qwen3NextConfig(), "layers of linear_attention"),
    "no attention": (MambaConfig(), "layers of linear_attention"),
    "own attention": (BloomConfig(), "its own attention code"),
    "both directions": (BertConfig(), "in both directions"),
    "encoder and decoder": (T5Config(), "generates no text"),
    "other frames": (
        InternVLConfig(),
        f"none of the supported Video-LLMs: {', '.join(FAMILIES)}",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_architectures_are_found_from_the_configuration(
    case: str, tmp_path: Path
) -> None:
    config, reason = UNSUPPORTED[case]
    # the folder contains neither tokenizer nor weights
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as caught:
        Checkpoint.load(str(tmp_path))
    assert reason in str(caught.value) and config.model_type in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(),
        MistralConfig(sliding_window=None),
        # the window covers every context
        MistralConfig(sliding_window=8192, max_position_embeddings=8192),
    ],
)
def test_supported_configurations(config: Any) -> None:
    assert unsupported_reason(config, generation_class(config)) is None
