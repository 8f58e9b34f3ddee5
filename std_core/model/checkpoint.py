"""A checkpoint without its weights: tokenization, preprocessing of frames, sizes.

All preprocessing is done by Hugging Face's own processors, so that the plan and the engine count
the same tokens.
"""

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
    IMAGE,
    VIDEO,
    Family,
    generation_class,
    has_vision_tower,
    unsupported_reason,
)
from std_core.model.file_hashes import sha256_of_files
from std_core.types import Geometry, Request, RequestError

# bytes of a file that enter a checkpoint's hash directly
INLINE_LIMIT = 64 << 20
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True)
class ModelInputs:
    """What the model takes for one request; the batch size is 1.

    Args:
        ids: (1, n).
        token_types: (1, n), 0 for text, else `families.IMAGE` or `families.VIDEO`.
        video_patches: (patches, channels × temporal patch × patch²).
            LLaVA-OneVision: (frames of all videos, 3, height, width).
        video_grid: (videos, 3): temporal, height, width in patches.
            LLaVA-OneVision: frames, height, width in pixels.
        image_patches: as `video_patches`.
            LLaVA-OneVision: (images, crops, 3, height, width).
        image_grid: (images, 3), as `video_grid`.
            LLaVA-OneVision: (images, 2), the images' original sizes.
        second_per_grid: (videos,) seconds between two temporal patches, for models whose positions
            depend on time.
    """

    ids: torch.Tensor
    token_types: torch.Tensor
    video_patches: torch.Tensor | None = None
    video_grid: torch.Tensor | None = None
    image_patches: torch.Tensor | None = None
    image_grid: torch.Tensor | None = None
    second_per_grid: torch.Tensor | None = None

    @property
    def visual_positions(self) -> torch.Tensor:
        """(m_v,) positions of the visual tokens."""
        return self.token_types[0].nonzero()[:, 0]

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix that other questions can share.

        It ends with the last visual token. Without visual tokens it is all but `TEXT_SUFFIX`.
        """
        if len(self.visual_positions):
            return int(self.visual_positions[-1]) + 1
        return max(0, self.ids.shape[1] - TEXT_SUFFIX)

    @property
    def selectable_positions(self) -> torch.Tensor:
        """Positions in the prefix that a draft may leave out: visual tokens, or else all."""
        if len(self.visual_positions):
            return self.visual_positions
        return torch.arange(self.prefix_length)


class Checkpoint:
    """Configuration and processor of a Video-LLM or a text model.

    Args:
        path: a local folder, a hub id or a `.gguf` file.
        processor: of a text model its tokenizer.
        pretrained_kwargs: keywords of `from_pretrained` that locate the checkpoint.
        revision: hash of the local files, or the hub's commit.
    """

    def __init__(
        self,
        path: str,
        config: Any,
        processor: Any,
        pretrained_kwargs: dict[str, Any],
        revision: str,
    ):
        self.path = path
        self.config = config
        self.processor = processor
        self.pretrained_kwargs = pretrained_kwargs
        self.revision = revision
        self.tokenizer = getattr(processor, "tokenizer", processor)

    @classmethod
    def load(cls, path: str) -> Checkpoint:
        """Load configuration and processor.

        Raises:
            ValueError: there is no checkpoint, or its model is not supported.
        """
        kwargs = pretrained_kwargs(path)
        try:
            config = AutoConfig.from_pretrained(**kwargs)
            if reason := unsupported_reason(config, generation_class(config)):
                raise ValueError(f"it is a {config.model_type}, which {reason}")
            processor_class = AutoProcessor if has_vision_tower(config) else AutoTokenizer
            processor = processor_class.from_pretrained(**kwargs)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"model {path!r} cannot be loaded: {reason}") from error
        revision = checkpoint_hash(path) if os.path.exists(path) else str(config._commit_hash)
        checkpoint = cls(path, config, processor, kwargs, revision=revision)
        if has_vision_tower(config) and not checkpoint.supports_video:
            raise ValueError(
                f"model {path!r} is a {config.model_type}, whose processor takes no video"
            )
        if checkpoint.supports_video and not checkpoint.has_chat_template:
            raise ValueError(
                f"model {path!r} has no chat template, which states where a video is in a prompt"
            )
        return checkpoint

    def check_can_draft_for(self, other: Checkpoint) -> None:
        """Check that this model can be the second model of another one.

        Raises:
            ValueError: their tokenizers or geometries differ.
        """
        pair = f"model {self.path!r} cannot draft for {other.path!r}"
        if self.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise ValueError(f"{pair}: their tokenizers differ")
        if self.supports_video != other.supports_video:
            raise ValueError(f"{pair}: only one of them takes video")
        if self.supports_video and self.geometry != other.geometry:
            raise ValueError(f"{pair}: they cut frames into tokens differently")

    # --------------------------------------------------------------------------------- properties

    @property
    def supports_video(self) -> bool:
        """Whether requests may have videos and images. Text models have no `geometry`."""
        return hasattr(self.processor, "video_processor")

    @property
    def family(self) -> Family:
        """The model's family; not defined for text models."""
        return FAMILIES[self.config.model_type]

    @functools.cached_property
    def geometry(self) -> Geometry:
        """How frames become tokens; not defined for text models."""
        return self.family.geometry(self.processor)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt (visual ones included) and its output together."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def samples_by_default(self) -> bool:
        """Whether the generation configuration samples where a request sets no temperature."""
        path = self.pretrained_kwargs["pretrained_model_name_or_path"]
        try:
            return bool(GenerationConfig.from_pretrained(path).do_sample)
        except OSError:  # the checkpoint has no generation configuration
            return False

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are rendered with a chat template."""
        return bool(self.processor.chat_template)

    def model_size(self, dtype: str) -> ModelSize:
        """Return the whole model's size.

        Args:
            dtype: of weights and KV cache.
        """
        return full_model_size(self.config, DTYPE_BYTES[dtype], DTYPE_BYTES[dtype])

    # -------------------------------------------------------------------------------------- tokens

    def render(self, prompt: str, videos: int = 1, images: int = 0) -> str:
        """Render the chat template: the videos, the images, then the prompt.

        Without a chat template the prompt is returned unchanged.
        """
        if not self.has_chat_template:
            return prompt
        content: Any = prompt
        if self.supports_video:
            visual = [{"type": "video"}] * videos + [{"type": "image"}] * images
            content = [*visual, {"type": "text", "text": prompt}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def count_prompt_tokens(
        self, prompt: str, frames: int = 2, fps: float = 2.0, times: tuple[float, ...] = ()
    ) -> int:
        """Count the tokens of a prompt with one video, visual tokens excluded.

        Args:
            frames, fps, times: of the sampled video, for models that write timestamps into the
                prompt.
        """
        if self.supports_video and self.family.writes_timestamps:
            return self._count_timed_tokens(prompt, frames, fps, times)
        return self._count_untimed_tokens(prompt)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object per process, prompts repeat
    def _count_untimed_tokens(self, prompt: str) -> int:
        placeholders = int(self.supports_video)
        return len(self._tokenize(self.render(prompt, placeholders))) - placeholders

    def _count_timed_tokens(
        self, prompt: str, frames: int, fps: float, times: tuple[float, ...]
    ) -> int:
        """Count the tokens with a grid whose temporal patches are a single token each."""
        temporal_patches = -(-frames // self.geometry.temporal_patch_size)
        side = self.geometry.merge_size
        video = {
            "video_grid_thw": torch.tensor([[temporal_patches, side, side]]),
            "video_metadata": [video_metadata(frames, fps, times)],
        }
        expanded = self.processor.replace_video_token(video, 0)
        rendered = self.render(prompt).replace(self.processor.video_token, expanded, 1)
        return len(self._tokenize(rendered)) - temporal_patches

    def _tokenize(self, rendered: str) -> list[int]:
        """Tokenize a rendered prompt with the special tokens that `apply_chat_template` gives it.

        A text model's come from its chat template, if there is one. A Video-LLM's processor lets
        its tokenizer add them in any case.
        """
        add_special_tokens = self.supports_video or not self.has_chat_template
        return self.tokenizer(rendered, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Convert token ids to text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # ------------------------------------------------------------------------------- preprocessing

    def preprocess(self, request: Request) -> ModelInputs:
        """Tokenize a request's prompt and cut its frames into patches.

        Raises:
            RequestError: `invalid_request`: the prompt contains a placeholder or is empty, frames
                have a size that cannot be cut, or a text model's request has videos or images.
        """
        videos = (*([] if request.frames is None else [request.frames]), *request.videos)
        if not videos and not request.images:
            return self._preprocess_text(request.prompt)
        if not self.supports_video:
            raise RequestError(
                "invalid_request", f"a {self.config.model_type} takes no video and no image"
            )
        if any(v.ndim != 4 for v in videos) or any(i.ndim != 3 for i in request.images):
            raise RequestError(
                "invalid_request",
                "a video is (T, height, width, 3) and an image (height, width, 3)",
            )
        options: dict[str, Any] = {}
        if not self.family.processor_resizes:
            options["do_resize"] = False
        if videos:
            options["videos"] = [video.permute(0, 3, 1, 2) for video in videos]
            options["video_metadata"] = _metadata_of_videos(request, videos)
        if request.images:
            # one list per conversation
            options["images"] = [[image.permute(2, 0, 1) for image in request.images]]
        try:
            output = self.processor(
                text=[self.render(request.prompt, len(videos), len(request.images))],
                **options,
                do_sample_frames=False,
                return_mm_token_type_ids=True,
            )
        except (ValueError, IndexError, StopIteration, RuntimeError) as error:
            raise RequestError(
                "invalid_request", f"the model's processor refused the request: {error}"
            ) from error
        inputs = _model_inputs(output)
        _check_placeholders(inputs, images=bool(request.images), videos=bool(videos))
        return inputs

    def _preprocess_text(self, prompt: str) -> ModelInputs:
        ids = torch.tensor([self._tokenize(self.render(prompt, 0))], dtype=torch.long)
        if not ids.numel():
            raise RequestError("invalid_request", "the prompt has no tokens")
        token_types = torch.zeros_like(ids)
        if self.supports_video:
            token_types = torch.tensor(self.processor.create_mm_token_type_ids(ids))
        inputs = ModelInputs(ids, token_types)
        _check_placeholders(inputs, images=False, videos=False)
        return inputs


def _metadata_of_videos(request: Request, videos: tuple[torch.Tensor, ...]) -> list[VideoMetadata]:
    """Return the metadata of a request's videos; `times` are those of `frames`, the first one."""
    metadata = [video_metadata(len(video), request.fps) for video in videos]
    if request.frames is not None:
        metadata[0] = video_metadata(len(request.frames), request.fps, request.times)
    return metadata


def video_metadata(frames: int, fps: float, times: tuple[float, ...] = ()) -> VideoMetadata:
    """Return the metadata of a video that consists of the sampled frames.

    Args:
        times: of the frames, in seconds; equally spaced if not given.
    """
    frame_indices: list[Any] = [time * fps for time in times] or list(range(frames))
    return VideoMetadata(
        total_num_frames=frames, fps=fps, duration=frames / fps, frames_indices=frame_indices
    )


def _model_inputs(output: Any) -> ModelInputs:
    """Convert a processor's output. It has lists where videos or images may differ in size."""
    video_patches = output.get("pixel_values_videos")
    video_grid = output.get("video_grid_thw")
    image_patches = output.get("pixel_values")
    image_grid = output.get("image_grid_thw", output.get("image_sizes"))
    second_per_grid = output.get("second_per_grid_ts")
    if isinstance(video_patches, list):
        video_grid = [[len(video), *video.shape[2:]] for video in video_patches]
        video_patches = torch.cat(video_patches)
    if isinstance(image_patches, list):
        image_patches = torch.stack(image_patches)
    return ModelInputs(
        torch.tensor(output["input_ids"]),
        token_types=torch.tensor(output["mm_token_type_ids"]),
        video_patches=video_patches,
        video_grid=None if video_grid is None else torch.as_tensor(video_grid),
        image_patches=image_patches,
        image_grid=None if image_grid is None else torch.as_tensor(image_grid),
        second_per_grid=None if second_per_grid is None else torch.tensor(second_per_grid),
    )


def _check_placeholders(inputs: ModelInputs, images: bool, videos: bool) -> None:
    """Raise RequestError where a prompt contains placeholders and the request has no such input."""
    for token_type, name, given in ((IMAGE, "image", images), (VIDEO, "video", videos)):
        if not given and bool((inputs.token_types == token_type).any()):
            raise RequestError(
                "invalid_request",
                f"the prompt contains the model's placeholder for {name}s, "
                f"but the request has no {name}",
            )


# -------------------------------------------------------------------------------------------- sizes


def full_model_size(config: Any, weight_bytes: float, kv_bytes: float) -> ModelSize:
    """Return a model's size with the parameters of all its parts, counted on the meta device."""
    with torch.device("meta"):
        model_class: Callable[[Any], Any] = generation_class(config)  # type: ignore[assignment]
        hf = model_class(config)
    text_modules = (hf.get_decoder(), hf.get_output_embeddings())
    text_parameters = {id(p) for module in text_modules for p in module.parameters()}
    parameters = list(hf.parameters())
    size = replace(
        ModelSize.of(config, weight_bytes, kv_bytes),
        parameters=sum(p.numel() for p in parameters),
    )
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return replace(size, patches=1)
    return replace(
        size,
        tower=sum(p.numel() for p in parameters if id(p) not in text_parameters),
        tower_width=getattr(vision, "embed_dim", None) or vision.hidden_size,
        patches=getattr(vision, "spatial_merge_size", 2) ** 2,
    )


# -------------------------------------------------------------------------------------------- files


def pretrained_kwargs(path: str) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that locate a folder, a hub id or a GGUF file.

    Code in the checkpoint is never run: without `trust_remote_code`, transformers would ask for it
    on a terminal.
    """
    if not path.endswith(".gguf"):
        return {"pretrained_model_name_or_path": path, "trust_remote_code": False}
    return {
        "trust_remote_code": False,
        "pretrained_model_name_or_path": os.path.dirname(path) or ".",
        "gguf_file": os.path.basename(path),
    }


def checkpoint_hash(path: str) -> str:
    """Return the revision of a local checkpoint, 32 hex digits.

    It is a hash of the files' names, sizes and whole contents. Of files above `INLINE_LIMIT` the
    SHA-256 enters it, which is remembered, see `file_hashes`. A single file is hashed like a folder
    that contains only it.
    """
    top = Path(path)
    if top.is_file():
        files = [top]
        base = top.parent
    else:
        files = sorted(p for p in top.rglob("*") if p.is_file())
        base = top
    sizes = [file.stat().st_size for file in files]
    large = [file for file, size in zip(files, sizes, strict=True) if size > INLINE_LIMIT]
    large_digests = dict(zip(large, sha256_of_files(large), strict=True))
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.relative_to(base).as_posix()}\0{size}\0".encode())
        digest.update(large_digests[file].encode() if file in large_digests else file.read_bytes())
    return digest.hexdigest()[:32]
