"""A checkpoint without its weights: prompts to token ids, frames to patches, sizes. All of it is
Hugging Face's own processors; this file only asks them, so that the plan and the engine count the
same tokens."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig
from transformers.video_utils import VideoMetadata

from std_core.cost_model.memory import TEXT_SUFFIX
from std_core.cost_model.model_size import ModelSize
from std_core.model.families import (
    FAMILIES,
    Family,
    generation_class,
    has_vision_tower,
    unsupported_reason,
)
from std_core.types import Geometry, Request, RequestError

WHOLE = 64 << 20  # bytes; files above it enter a folder's hash by size, first and last MiB
BYTES = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class ModelInputs:
    """What the model is fed for one request; batch of 1. Patches: (patches, channels × temporal
    patch × patch²); grids: (videos or images, 3), temporal, height, width in patches.

    LLaVA-OneVision: frames (T of all videos, 3, height, width) and grids of (T, height, width) in
    pixels; images (images, crops, 3, height, width) and their sizes before that, (images, 2)."""

    ids: torch.Tensor  # (1, n)
    token_types: torch.Tensor  # (1, n): 0 text, 1 image, 2 video
    video_patches: torch.Tensor | None = None
    video_grid: torch.Tensor | None = None
    image_patches: torch.Tensor | None = None
    image_grid: torch.Tensor | None = None
    second_per_grid: torch.Tensor | None = (
        None  # (videos,) between two temporal patches, where positions go by time
    )

    @property
    def visual_positions(self) -> torch.Tensor:
        """(m_v,) places of visual tokens."""
        return self.token_types[0].nonzero()[:, 0]

    @property
    def prefix_length(self) -> int:
        """Length of the prefix that other questions can share: up to the last visual token, or all
        but the tail."""
        return (
            int(self.visual_positions[-1]) + 1
            if len(self.visual_positions)
            else max(0, self.ids.shape[1] - TEXT_SUFFIX)
        )

    @property
    def selectable_positions(self) -> torch.Tensor:
        """Places in the prefix that a draft may leave out."""
        return (
            self.visual_positions
            if len(self.visual_positions)
            else torch.arange(self.prefix_length)
        )


class Checkpoint:
    """Configuration and processor of a local folder, a hub id or a `.gguf` file, whether a
    Video-LLM or a text model.

    Args:
        processor: of a text model its tokenizer.
        source: what `from_pretrained` is called with, besides what the call is about.
        revision: hash of the local files, or the hub's commit.
    """

    def __init__(
        self, path: str, config: Any, processor: Any, source: dict[str, Any], revision: str
    ):
        self.path = path
        self.config = config
        self.processor = processor
        self.source = source
        self.revision = revision
        self.tokenizer = getattr(processor, "tokenizer", processor)

    @classmethod
    def load(cls, path: str) -> Checkpoint:
        """Raises ValueError, in one sentence, where nothing that can be driven is found."""
        source = pretrained_source(path)
        try:
            config = AutoConfig.from_pretrained(**source)
            if why := unsupported_reason(config, generation_class(config)):
                raise ValueError(f"it is a {config.model_type}, which {why}")
            processor = (
                AutoProcessor if has_vision_tower(config) else AutoTokenizer
            ).from_pretrained(**source)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(
                f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        local = os.path.exists(path)
        found = cls(
            path,
            config,
            processor,
            source,
            checkpoint_hash(path) if local else str(config._commit_hash),
        )
        if has_vision_tower(config) and not found.supports_video:
            raise ValueError(
                f"model {path!r} is a {config.model_type}, whose processor takes no video"
            )
        if found.supports_video and not found.has_chat_template:
            raise ValueError(
                f"model {path!r} has no chat template, which says where in a prompt a video stands"
            )
        return found

    def check_can_draft_for(self, other: Checkpoint) -> None:
        """Raises ValueError where this model cannot be the draft of another: it reads other tokens
        or cuts frames differently."""
        if self.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise ValueError(
                f"model {self.path!r} cannot draft for {other.path!r}: their tokenizers differ"
            )
        if self.supports_video != other.supports_video or (
            self.supports_video and self.geometry != other.geometry
        ):
            raise ValueError(
                f"model {self.path!r} cannot draft for {other.path!r}: they cut frames differently"
            )

    @property
    def supports_video(self) -> bool:
        """Whether a request may show anything; there is a `geometry` only then."""
        return hasattr(self.processor, "video_processor")

    @property
    def family(self) -> Family:
        """Of a model that takes video."""
        return FAMILIES[self.config.model_type]

    @functools.cached_property
    def geometry(self) -> Geometry:
        return self.family.geometry(self.processor)

    @property
    def max_model_len(self) -> int:
        """The window: prompt, visual tokens and what is written, together."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def samples_by_default(self) -> bool:
        """Whether texts are drawn, not greedy, where a request does not say."""
        try:
            return bool(
                GenerationConfig.from_pretrained(
                    self.source["pretrained_model_name_or_path"]
                ).do_sample
            )
        except OSError:  # it has no such configuration
            return False

    def model_size(self, dtype: str) -> ModelSize:
        """Sizes of the whole model, with weights and cache in a precision."""
        return full_model_size(self.config, BYTES[dtype], BYTES[dtype])

    def render(self, prompt: str, videos: int = 1, images: int = 0) -> str:
        """The chat template around a prompt with its videos, then its images, before it; without a
        template the prompt as it is."""
        if not self.has_chat_template:
            return prompt
        shown = [{"type": "video"}] * videos + [{"type": "image"}] * images
        content = [*shown, {"type": "text", "text": prompt}] if self.supports_video else prompt
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self.processor.chat_template)

    def count_prompt_tokens(
        self, prompt: str, frames: int = 2, fps: float = 2.0, times: tuple[float, ...] = ()
    ) -> int:
        """Tokens of the rendered prompt, the visual ones of its one video not counted.

        Args: frames, fps, times: of the video's sample, for models whose prompt tells the time of
            each frame.
        """
        if self.supports_video and self.family.writes_timestamps:
            return self._timed_tokens(prompt, frames, fps, times)
        return self._plain_tokens(prompt)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object per process, prompts repeat
    def _plain_tokens(self, prompt: str) -> int:
        visual = int(self.supports_video)  # the placeholder of the video
        return len(self._ids(self.render(prompt, visual))) - visual

    def _timed_tokens(self, prompt: str, frames: int, fps: float, times: tuple[float, ...]) -> int:
        """As if each temporal patch were a single token."""
        patches = -(-frames // self.geometry.temporal_patch_size)
        side = self.geometry.merge_size
        shown = {
            "video_grid_thw": torch.tensor([[patches, side, side]]),
            "video_metadata": [_sampled(frames, fps, times)],
        }
        expanded = self.processor.replace_video_token(shown, 0)
        return (
            len(self._ids(self.render(prompt).replace(self.processor.video_token, expanded, 1)))
            - patches
        )

    def _ids(self, rendered: str) -> list[int]:
        """As `apply_chat_template` has it: a text's special tokens come from the template, where
        there is one. A Video-LLM's processor, which is never asked to leave them out, adds what its
        tokenizer adds."""
        return self.tokenizer(
            rendered, add_special_tokens=self.supports_video or not self.has_chat_template
        )["input_ids"]

    def preprocess(self, request: Request) -> ModelInputs:
        """Ids and patches of a request.

        Raises: RequestError: `invalid_request` where the processor does not take it (a prompt that
            itself contains the
                placeholder, frames of a size that it can't cut, anything to look at for a text
                model).
        """
        videos = (*([] if request.frames is None else [request.frames]), *request.videos)
        if not videos and not request.images:
            return self._text_inputs(request.prompt)
        if not self.supports_video:
            raise RequestError(
                "invalid_request", f"a {self.config.model_type} takes no video and no image"
            )
        if any(v.ndim != 4 for v in videos) or any(i.ndim != 3 for i in request.images):
            raise RequestError(
                "invalid_request",
                "a video is (T, height, width, 3) and an image (height, width, 3)",
            )
        fed: dict[str, Any] = {} if self.family.processor_resizes else {"do_resize": False}
        if videos:
            fed["videos"] = [v.permute(0, 3, 1, 2) for v in videos]
            times = [() if request.frames is None else request.times, *([()] * len(videos))]
            fed["video_metadata"] = [
                _sampled(len(v), request.fps, t) for v, t in zip(videos, times, strict=False)
            ]
        if request.images:
            fed["images"] = [[i.permute(2, 0, 1) for i in request.images]]  # of one conversation
        try:
            out = self.processor(
                text=[self.render(request.prompt, len(videos), len(request.images))],
                **fed,
                do_sample_frames=False,
                return_mm_token_type_ids=True,
            )
        except (ValueError, IndexError, StopIteration, RuntimeError) as error:
            raise RequestError(
                "invalid_request", f"the model's processor refused the request: {error}"
            ) from error
        return _checked(_collected(out), bool(request.images), bool(videos))

    def _text_inputs(self, prompt: str) -> ModelInputs:
        ids = torch.tensor([self._ids(self.render(prompt, 0))], dtype=torch.long)
        if not ids.numel():
            raise RequestError("invalid_request", "the prompt has no tokens")
        types = torch.zeros_like(ids)
        if self.supports_video:
            types = torch.tensor(self.processor.create_mm_token_type_ids(ids))
        return _checked(ModelInputs(ids, types), images=False, videos=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _sampled(frames: int, fps: float, times: tuple[float, ...] = ()) -> VideoMetadata:
    """Frames that are all there is of a video; shown at `times` s, where those are known."""
    numbers: list[Any] = [time * fps for time in times] or list(range(frames))
    return VideoMetadata(
        total_num_frames=frames, fps=fps, duration=frames / fps, frames_indices=numbers
    )


def _collected(out: Any) -> ModelInputs:
    """A processor's output; what it gives as lists has parts that may differ in size."""
    videos, video_grid, seconds = (
        out.get(k) for k in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    )
    images = out.get("pixel_values")
    image_grid = out.get("image_grid_thw", out.get("image_sizes"))
    if isinstance(videos, list):
        video_grid = [[len(v), *v.shape[2:]] for v in videos]
        videos = torch.cat(videos)
    return ModelInputs(
        torch.tensor(out["input_ids"]),
        token_types=torch.tensor(out["mm_token_type_ids"]),
        video_patches=videos,
        video_grid=None if video_grid is None else torch.as_tensor(video_grid),
        image_patches=torch.stack(images) if isinstance(images, list) else images,
        image_grid=None if image_grid is None else torch.as_tensor(image_grid),
        second_per_grid=None if seconds is None else torch.tensor(seconds),
    )


def _checked(inputs: ModelInputs, images: bool, videos: bool) -> ModelInputs:
    """Raises RequestError where a prompt holds a placeholder for what the request doesn't show."""
    for kind, name, shown in ((1, "image", images), (2, "video", videos)):
        if not shown and bool((inputs.token_types == kind).any()):
            raise RequestError(
                "invalid_request",
                f"the prompt holds the model's placeholder for {name}s, and no {name} is shown",
            )
    return inputs


def full_model_size(config: Any, weight_bytes: float, kv_bytes: float) -> ModelSize:
    """An account with the sizes of the whole model, which is built without storage."""
    with torch.device("meta"):
        writer: Callable[[Any], Any] = generation_class(config)  # type: ignore[assignment]
        hf = writer(config)
    text = {
        id(p) for part in (hf.get_decoder(), hf.get_output_embeddings()) for p in part.parameters()
    }
    sizes = [(id(p) in text, p.numel()) for p in hf.parameters()]
    vision = getattr(config, "vision_config", None)
    return replace(
        ModelSize.of(config, weight_bytes, kv_bytes),
        parameters=sum(size for _, size in sizes),
        tower=sum(size for is_text, size in sizes if not is_text) if vision else 0,
        tower_width=(getattr(vision, "embed_dim", None) or vision.hidden_size) if vision else 0,
        patches=getattr(vision, "spatial_merge_size", 2) ** 2 if vision else 1,
    )


def pretrained_source(path: str) -> dict[str, Any]:
    """What `from_pretrained` needs to find a checkpoint: a folder or hub id, or a folder and the
    file in it."""
    if not path.endswith(".gguf"):
        return {"pretrained_model_name_or_path": path}
    return {
        "pretrained_model_name_or_path": os.path.dirname(path) or ".",
        "gguf_file": os.path.basename(path),
    }


def checkpoint_hash(path: str) -> str:
    """Identity of a local checkpoint: its files' names and contents (of very large files the size
    and both ends). A single file counts as a folder that holds nothing else."""
    digest = hashlib.sha256()
    top = Path(path)
    files, base = (
        ([top], top.parent)
        if top.is_file()
        else (sorted(p for p in top.rglob("*") if p.is_file()), top)
    )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(base).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(WHOLE if size <= WHOLE else 1 << 20))
            if size > WHOLE:
                stream.seek(-(1 << 20), os.SEEK_END)
                digest.update(stream.read())
    return digest.hexdigest()[:32]
