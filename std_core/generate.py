"""The engine behind the signature of `generate`.

For notebooks, and for code that has loaded a Hugging Face model itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import transformers

from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.model.positions import PositionRule, reference_positions, transformers_positions
from std_core.types import Draft, Request, Result, Sampling

logger = logging.getLogger(__name__)

IMAGE = 1  # in `mm_token_type_ids`; text is 0
VIDEO = 2


def sparse_to_dense(
    model: Any,
    draft: Draft | None = None,
    positions: PositionRule = "transformers",
    **settings: int,
) -> SparseToDense:
    """Wrap a loaded model in a faster `generate` that returns the same tokens.

    Args:
        model: any supported Hugging Face Video-LLM or text model. Its own `generate` keeps working.
        draft: how tokens are drafted; if not given, from the top K entries by the question's
            attention (Sparse-to-Dense §3.2).
        positions: where the text behind a video continues. The default gives the tokens of the
            installed transformers' `generate`; `reference` the positions that Qwen2-VL and
            Qwen2.5-VL were trained with, and the tokens of vLLM (`std_core.model.positions`). Where
            they differ, a warning is logged once.
        settings: fields of `Engine`: `max_num_seqs`, `prefill_chunk`, `strict`.

    Raises:
        ValueError: the model's architecture is not supported.
    """
    return SparseToDense(model, draft or Draft(), positions, **settings)


class SparseToDense:
    """See `sparse_to_dense`.

    `results` holds those of the last call, one per row: rounds, drafted and accepted tokens, share
    of the KV entries that the draft read, times.
    """

    def __init__(self, hf: Any, draft: Draft, positions: PositionRule, **settings: int):
        self.hf = hf
        self.draft = draft
        self.results = list[Result]()
        model = Model(hf, position_rule=positions)
        self._warns_of_positions = positions == "transformers" and model.mrope is not None
        window = int(hf.config.get_text_config().max_position_embeddings)
        self._engine = Engine(model, _NoCheckpoint(window), **settings)  # type: ignore[arg-type]
        model.restore_attention()

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        pad_token_id: int | None = None,
        **visual_inputs: Any,
    ) -> torch.Tensor:
        """Return what `model.generate` returns for the same arguments.

        Greedy, or sampled as the generation configuration says.

        Args:
            input_ids, attention_mask: (B, n); masked positions are skipped, on either side.
            seed: row i has seed `seed` + i, and its text is reproducible; without one every call
                samples another text.
            visual_inputs: the processor's other outputs (`pixel_values_videos`, `video_grid_thw`,
                `mm_token_type_ids`, …), as one batch.

        Returns:
            (B, n + longest output), prompts included; shorter rows are padded on the right.

        Raises:
            ValueError: `max_new_tokens` is missing, or larger than the model's window allows.
            RequestError: the model cannot answer a row.
        """
        defaults = self.hf.generation_config
        max_tokens = max_new_tokens if max_new_tokens is not None else defaults.max_new_tokens
        if max_tokens is None:
            raise ValueError(
                "max_new_tokens is missing: neither the call nor the generation configuration has"
                " one"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self._check_window(int(mask.sum(1).max()), max_tokens)
        if do_sample and temperature is None:
            temperature = defaults.temperature or 1.0
        if do_sample is False:
            temperature = 0.0
        sampling = Sampling(
            max_tokens,
            min_tokens=min_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
        )
        rows = list(_split_rows(self.hf.config, input_ids, mask, visual_inputs))
        self._warn_of_positions(rows)
        self.results = self._run(rows, sampling, seed)
        pad = defaults.pad_token_id if pad_token_id is None else pad_token_id
        return self._padded(input_ids, pad)

    def _check_window(self, longest: int, max_tokens: int) -> None:
        window = self._engine.checkpoint.max_model_len
        if longest + max_tokens > window:
            raise ValueError(
                f"{longest} tokens of prompt and max_new_tokens = {max_tokens}: the window holds"
                f" {window}"
            )

    def _warn_of_positions(self, rows: list[ModelInputs]) -> None:
        """Log once that transformers' positions are not those that the model was trained with."""
        mrope = self._engine.model.mrope
        for inputs in rows:
            if not self._warns_of_positions or mrope is None or not len(inputs.visual_positions):
                continue
            reference = reference_positions(inputs, mrope)
            if torch.equal(reference, transformers_positions(self.hf, inputs).cpu()):
                continue
            self._warns_of_positions = False
            logger.warning(
                "transformers %s places the text behind a video at other positions than the model"
                " was trained with; its generate and this one answer worse than the model can:"
                ' sparse_to_dense(model, positions="reference") uses the right ones',
                transformers.__version__,
            )

    def _run(self, rows: list[ModelInputs], sampling: Sampling, seed: int | None) -> list[Result]:
        """Results in the order of the rows."""
        requests = []
        for number in range(len(rows)):
            own = sampling if seed is None else replace(sampling, seed=seed + number)
            requests.append(Request(str(number), "", sampling=own))
        results = {}
        # between calls the model has its own attention, so that its own `generate` works
        self._engine.model.install_attention()
        try:
            for result in self._engine.run(
                requests, self.draft, prepare=lambda request: rows[int(request.request_id)]
            ):
                results[result.request_id] = result
        finally:
            self._engine.model.restore_attention()
        for result in results.values():
            if result.error is not None:
                raise result.error
        return [results[request.request_id] for request in requests]

    def _padded(self, input_ids: torch.Tensor, pad: int | None) -> torch.Tensor:
        if pad is None:  # as in transformers' `generate`
            eos = self.hf.generation_config.eos_token_id
            pad = eos[0] if isinstance(eos, list) else eos
        longest = max(len(result.token_ids) for result in self.results)
        outputs = [
            result.token_ids + [pad or 0] * (longest - len(result.token_ids))
            for result in self.results
        ]
        return torch.cat([input_ids, torch.tensor(outputs, device=input_ids.device)], dim=1)


@dataclass(frozen=True)
class _NoCheckpoint:
    """Stands in for a checkpoint: prompts and outputs are token ids, not text."""

    max_model_len: int

    def decode(self, ids: list[int]) -> str:
        return ""


# ------------------------------------------------------------------ a processor's batch, row by row


@dataclass(frozen=True)
class _Item:
    """One video or image of a batch."""

    patches: torch.Tensor
    grid: torch.Tensor  # (1, …), as in `ModelInputs`
    tokens: int  # 0 if unknown before the vision tower has run


def _split_rows(
    config: Any, ids: torch.Tensor, mask: torch.Tensor, visual_inputs: dict[str, Any]
) -> Iterator[ModelInputs]:
    """Split a processor's batch into rows without padding.

    Raises:
        TypeError: outputs that no supported model takes.
        ValueError: the number of a row's placeholders does not match its videos or images.
    """
    rest = dict(visual_inputs)
    types = rest.pop("mm_token_type_ids", None)
    if types is None:
        types = _types_by_placeholder(config, ids)
    image_grids = rest.pop("image_grid_thw", rest.pop("image_sizes", None))
    images = _items(config, rest.pop("pixel_values", None), image_grids)
    videos = _items(config, rest.pop("pixel_values_videos", None), rest.pop("video_grid_thw", None))
    image_counts = rest.pop("batch_num_images", None)  # LLaVA-OneVision: images of each row
    seconds = rest.pop("second_per_grid_ts", None)
    seconds_left = iter(() if seconds is None else seconds)
    if rest:
        raise TypeError(f"generate takes no {', '.join(sorted(rest))}")
    for row in range(len(ids)):
        unmasked = mask[row].bool()
        row_types = types[row, unmasked]
        count = None if image_counts is None else int(image_counts[row])
        row_images = _take(images, int((row_types == IMAGE).sum()), row, "image", count=count)
        row_videos = _take(videos, int((row_types == VIDEO).sum()), row, "video")
        video_patches, video_grid = _joined(row_videos)
        image_patches, image_grid = _joined(row_images)
        row_seconds = None
        if row_videos and seconds is not None:
            row_seconds = torch.tensor([float(next(seconds_left)) for _ in row_videos])
        yield ModelInputs(
            ids[row : row + 1, unmasked],
            token_types=row_types[None],
            video_patches=video_patches,
            video_grid=video_grid,
            image_patches=image_patches,
            image_grid=image_grid,
            second_per_grid=row_seconds,
        )


def _types_by_placeholder(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """`mm_token_type_ids` for models whose processor does not return them."""
    is_image = ids == getattr(config, "image_token_id", -1)
    is_video = ids == getattr(config, "video_token_id", -1)
    return IMAGE * is_image.long() + VIDEO * is_video.long()


def _items(config: Any, patches: Any, grids: torch.Tensor | None) -> Iterator[_Item]:
    """Videos or images of a batch, in its order."""
    if patches is None:
        return
    if grids is None:
        yield from _llava_videos(config, patches)
    elif grids.shape[1] == 2:  # LLaVA-OneVision's images: (images, crops, 3, height, width)
        for image, size in zip(patches, grids, strict=True):
            yield _Item(image[None], grid=size[None], tokens=0)
    else:
        merged = config.vision_config.spatial_merge_size**2
        start = 0
        for grid in grids:
            count = int(grid.prod())
            yield _Item(patches[start : start + count], grid=grid[None], tokens=count // merged)
            start += count


def _llava_videos(config: Any, videos: Any) -> Iterator[_Item]:
    """LLaVA-OneVision's videos: (videos, T, 3, height, width)."""
    vision = config.vision_config
    side = math.ceil(vision.image_size // vision.patch_size / 2)
    for video in videos:
        size = torch.tensor([[len(video), *video.shape[2:]]])
        yield _Item(video, grid=size, tokens=len(video) * side**2 + 1)


def _take(
    items: Iterator[_Item], tokens: int, row: int, name: str, count: int | None = None
) -> list[_Item]:
    """Take a row's items from the batch's.

    Args:
        tokens: placeholders of the row; items are taken until they are filled.
        count: number of items, if it is known.
    """
    if count is not None:
        return list(islice(items, count))
    taken: list[_Item] = []
    filled = 0
    while filled < tokens:
        item = next(items, None)
        if item is None:
            break
        taken.append(item)
        filled += item.tokens
    if filled != tokens:
        raise ValueError(
            f"row {row} has {tokens} placeholders of {name}s, which is no number of whole {name}s"
        )
    return taken


def _joined(items: list[_Item]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Patches and grids of all items."""
    if not items:
        return None, None
    return torch.cat([item.patches for item in items]), torch.cat([item.grid for item in items])
