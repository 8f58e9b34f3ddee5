"""A checkpoint without its weights: prompts to token ids, frames to patches, sizes. All of it is Hugging Face's own
processors; this file only asks them, so that the plan and the engine count the same tokens."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor

from std_core.types import Geometry, Request, RequestError

WHOLE = 64 << 20  # bytes; files above it enter a folder's hash by size, first and last MiB


TAIL = 64  # of a prompt without visual tokens: what lies before its last 64 takes their part in a selection


@dataclass(frozen=True)
class Inputs:
    """What the model is fed for one request; batch of 1. Patches: (patches, channels × temporal patch × patch²); grids:
    (videos or images, 3), temporal, height, width in patches."""

    ids: torch.Tensor  # (1, n)
    types: torch.Tensor  # (1, n): 0 text, 1 image, 2 video
    video_patches: torch.Tensor | None = None
    video_grid: torch.Tensor | None = None
    image_patches: torch.Tensor | None = None
    image_grid: torch.Tensor | None = None

    @property
    def visual(self) -> torch.Tensor:
        """(m_v,) places of visual tokens."""
        return self.types[0].nonzero()[:, 0]

    @property
    def cut(self) -> int:
        """Length of the prefix that other questions can share: up to the last visual token, or all but the tail."""
        return int(self.visual[-1]) + 1 if len(self.visual) else max(0, self.ids.shape[1] - TAIL)

    @property
    def selectable(self) -> torch.Tensor:
        """Places in the prefix that a draft may leave out."""
        return self.visual if len(self.visual) else torch.arange(self.cut)


class Checkpoint:
    """Processor and configuration of a local folder or a hub id.

    Raises ValueError, in one sentence, for a folder that holds no Video-LLM that can be read.
    """

    def __init__(self, path: str, config: Any, processor: Any, revision: str):
        self.path, self.config, self.processor, self.revision = path, config, processor, revision

    @classmethod
    def load(cls, path: str) -> Checkpoint:
        try:
            config = AutoConfig.from_pretrained(path)
            processor = AutoProcessor.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        if not hasattr(processor, "video_processor") or not hasattr(config, "vision_config"):
            raise ValueError(f"model {path!r} is a {config.model_type}, which takes no video")
        local = os.path.isdir(path)
        return cls(path, config, processor, folder_hash(path) if local else str(config._commit_hash))

    @functools.cached_property
    def geometry(self) -> Geometry:
        video = self.processor.video_processor
        return Geometry(
            patch_size=video.patch_size,
            temporal_patch_size=video.temporal_patch_size,
            merge_size=video.merge_size,
            min_pixels=video.size["shortest_edge"],
            max_pixels=video.size["longest_edge"],
        )

    @property
    def max_model_len(self) -> int:
        """The window: prompt, visual tokens and what is written, together."""
        return int(self.config.get_text_config().max_position_embeddings)

    def render(self, prompt: str, videos: int = 1, images: int = 0) -> str:
        """The chat template around a prompt with its videos, then its images, before it."""
        shown = [{"type": "video"}] * videos + [{"type": "image"}] * images
        return self.processor.apply_chat_template(
            [{"role": "user", "content": [*shown, {"type": "text", "text": prompt}]}],
            add_generation_prompt=True,
            tokenize=False,
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object per process, prompts repeat
    def prompt_tokens(self, prompt: str) -> int:
        """Tokens of the rendered prompt, the visual ones not counted."""
        return len(self.processor.tokenizer(self.render(prompt))["input_ids"]) - 1

    def inputs(self, request: Request) -> Inputs:
        """Ids and patches of a request.

        Raises:
            RequestError: `invalid_request` where the processor does not take it (a prompt that itself contains the
                placeholder, frames of a size that it can't cut).
        """
        videos = (*([] if request.frames is None else [request.frames]), *request.videos)
        if not videos and not request.images:
            raise RequestError("invalid_request", f"request {request.request_id} has neither frames nor images")
        if any(v.ndim != 4 for v in videos) or any(i.ndim != 3 for i in request.images):
            raise RequestError("invalid_request", "a video is (T, height, width, 3) and an image (height, width, 3)")
        fed: dict[str, list[torch.Tensor]] = {}
        if videos:
            fed |= {"videos": [v.permute(0, 3, 1, 2) for v in videos]}
        if request.images:
            fed |= {"images": [i.permute(2, 0, 1) for i in request.images]}
        try:
            out = self.processor(
                text=[self.render(request.prompt, len(videos), len(request.images))],
                **fed,
                do_resize=False,
                do_sample_frames=False,
                return_tensors="pt",
                return_mm_token_type_ids=True,
            )
        except (ValueError, IndexError, StopIteration, RuntimeError) as error:
            raise RequestError("invalid_request", f"the model's processor refused the request: {error}") from error
        return Inputs(
            out["input_ids"],
            out["mm_token_type_ids"],
            out.get("pixel_values_videos"),
            out.get("video_grid_thw"),
            out.get("pixel_values"),
            out.get("image_grid_thw"),
        )

    def decode(self, ids: list[int]) -> str:
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True)


def folder_hash(path: str) -> str:
    """Identity of a local checkpoint: its files' names and contents (of very large files the size and both ends)."""
    digest = hashlib.sha256()
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(WHOLE if size <= WHOLE else 1 << 20))
            if size > WHOLE:
                stream.seek(-(1 << 20), os.SEEK_END)
                digest.update(stream.read())
    return digest.hexdigest()[:32]
